/** Numbers, times and sizes as text. */
import type { Num } from "./types";

export const NONE = "–";

/** Format a number with about four significant digits; a missing one as a dash. */
export function num(value: Num | undefined, digits = 4): string {
  if (value === null || value === undefined) return NONE;
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value).replace("-", "−");
  const size = Math.abs(value);
  const text =
    size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
  return text.replace("-", "−");
}

/** Format with a fixed number of decimals, for columns. */
export function fixed(value: Num | undefined, decimals = 3): string {
  return value === null || value === undefined ? NONE : value.toFixed(decimals).replace("-", "−");
}

export function signed(value: Num | undefined, decimals = 3): string {
  if (value === null || value === undefined) return NONE;
  return (value > 0 ? "+" : "") + fixed(value, decimals);
}

export function percent(value: Num | undefined, decimals = 1): string {
  return value === null || value === undefined ? NONE : `${(100 * value).toFixed(decimals)} %`;
}

export function whole(value: Num | undefined): string {
  return value === null || value === undefined ? NONE : value.toLocaleString("en-US", { maximumFractionDigits: 0 });
}

export function seconds(value: Num | undefined): string {
  if (value === null || value === undefined) return NONE;
  if (value < 0.0995) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

/** Format a time (seconds since 1970) as its distance from now. */
export function ago(time: Num | undefined): string {
  if (time === null || time === undefined) return NONE;
  const distance = Math.max(0, Date.now() / 1000 - time);
  if (distance < 5) return "now";
  if (distance < 90) return `${Math.round(distance)} s ago`;
  if (distance < 5400) return `${Math.round(distance / 60)} min ago`;
  if (distance < 129600) return `${Math.round(distance / 3600)} h ago`;
  return `${Math.round(distance / 86400)} d ago`;
}

export function dateTime(time: Num | undefined): string {
  if (time === null || time === undefined) return NONE;
  const date = new Date(time * 1000);
  const two = (n: number) => String(n).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** Turn an identifier such as `truncated_turns` into words. */
export const words = (name: string) => name.replaceAll("_", " ");
