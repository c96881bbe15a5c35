/** Keys of the current page. A page registers its keys while it is shown; the help dialog lists them. */
import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";

export interface KeyAction {
  /** Keys as pressed, such as `j`, `?`, `ArrowLeft`, or two in a row: `g g`. */
  keys: string;
  help: string;
  run: () => void;
}

export const registered = signal<readonly KeyAction[][]>([]);

/** Use these keys while the component is mounted. */
export function useKeys(actions: KeyAction[]): void {
  const latest = useRef(actions);
  latest.current = actions;
  useEffect(() => {
    const mine = latest.current.map((action, i) => ({
      ...action,
      run: () => latest.current[i]?.run(),
    }));
    registered.value = [...registered.value, mine];
    return () => {
      registered.value = registered.value.filter((one) => one !== mine);
    };
  }, []);
}

const isTyping = (target: EventTarget | null) =>
  target instanceof HTMLElement &&
  (target.isContentEditable || ["INPUT", "TEXTAREA", "SELECT"].includes(target.tagName)) &&
  !(target instanceof HTMLInputElement && ["checkbox", "radio", "range"].includes(target.type));

let first = "";
let firstAt = 0;

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (isTyping(event.target)) {
    if (event.key === "Escape") (event.target as HTMLElement).blur();
    return;
  }
  if (document.querySelector("dialog[open]") && event.key !== "?") return;
  const isControl = event.target instanceof Element && event.target.closest("button, a, summary, input");
  if (isControl && (event.key === "Enter" || event.key === " ")) return;
  const now = performance.now();
  const pair = now - firstAt < 900 ? `${first} ${event.key}` : "";
  const all = registered.peek().flat().reverse();
  const action = all.find((one) => one.keys === pair) ?? all.find((one) => one.keys === event.key);
  first = event.key;
  firstAt = now;
  if (!action) return;
  event.preventDefault();
  if (action.keys === pair) first = "";
  action.run();
});
