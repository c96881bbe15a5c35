/** Light and dark. The system's choice applies until the user makes one, which the browser keeps. */
import { effect, signal } from "@preact/signals";

export type Theme = "auto" | "light" | "dark";
const KEY = "agentrl-theme";

const stored = localStorage.getItem(KEY);
export const theme = signal<Theme>(stored === "light" || stored === "dark" ? stored : "auto");

const system = matchMedia("(prefers-color-scheme: dark)");
const systemIsDark = signal(system.matches);
system.addEventListener("change", () => {
  systemIsDark.value = system.matches;
});

/** Changes when colours change, for what is drawn on a canvas. */
export const palette = signal(0);

effect(() => {
  const chosen = theme.value;
  void systemIsDark.value;
  if (chosen === "auto") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem(KEY);
  } else {
    document.documentElement.dataset.theme = chosen;
    localStorage.setItem(KEY, chosen);
  }
  palette.value = palette.peek() + 1;
});

/** Return a custom property of the style sheet as a colour that a canvas takes. */
export function color(name: string): string {
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

export const seriesColor = (i: number) => color(`series-${i % 8}`);
