/** The frame of every page: where one is, the theme, and the list of keys. */
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { registered, useKeys } from "../base/keys";
import { links, navigate } from "../base/router";
import { type Theme, theme } from "../base/theme";

export interface Crumb {
  text: ComponentChildren;
  to?: string;
}

const THEMES: readonly { value: Theme; text: string; title: string }[] = [
  { value: "auto", text: "Auto", title: "As the system" },
  { value: "light", text: "Light", title: "Light" },
  { value: "dark", text: "Dark", title: "Dark" },
];

const KEY_NAMES: Record<string, string> = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓" };
const keyText = (keys: string) => keys.split(" ").map((key) => KEY_NAMES[key] ?? key);

function Help({ close }: { close: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  const actions = registered.value.flat();
  return (
    <dialog ref={dialog} class="help" aria-labelledby="help-title" onClose={close}>
      <h2 id="help-title">Keys</h2>
      <table>
        <tbody>
          {actions.map((action) => (
            <tr key={action.keys}>
              <th scope="row">
                {keyText(action.keys).map((key, i) => (
                  <kbd key={`${i}${key}`}>{key}</kbd>
                ))}
              </th>
              <td>{action.help}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <form method="dialog">
        <button type="submit">Close</button>
      </form>
    </dialog>
  );
}

export function Shell(props: { title: string; crumbs: Crumb[]; source?: string; children: ComponentChildren }) {
  const [isHelpOpen, setHelpOpen] = useState(false);
  const { source } = props;
  useEffect(() => {
    document.title = `${props.title} · agentrl`;
  }, [props.title]);
  const go = (keys: string, help: string, to: string) => ({ keys, help, run: () => navigate(to) });
  useKeys([
    { keys: "?", help: "Show the keys of this page", run: () => setHelpOpen((is) => !is) },
    go("g r", "Go to the runs", links.runs()),
    ...(source
      ? [
          go("g o", "Go to the overview of this run", links.run(source)),
          go("g e", "Go to the episodes of this run", links.episodes(source)),
          go("g i", "Go to the episodes in flight", links.inFlight(source)),
        ]
      : []),
    go("g c", "Go to the comparison", links.compare(source)),
  ]);
  const path = location.pathname;
  const tab = (to: string, text: string) => (
    <a href={to} aria-current={path === to.split("?")[0] ? "page" : undefined}>
      {text}
    </a>
  );
  return (
    <>
      <a class="skip" href="#main" target="_self">
        Skip to the content
      </a>
      <header class="top">
        <a class="brand" href={links.runs()} aria-label="agentrl: all runs">
          <svg width="20" height="20" viewBox="0 0 32 32" aria-hidden="true">
            <rect width="32" height="32" rx="7" />
            <path d="M7 22l5-7 5 4 8-11" />
            <circle cx="25" cy="8" r="2.6" />
          </svg>
          agentrl
        </a>
        <nav class="crumbs" aria-label="Breadcrumb">
          <ol>
            {props.crumbs.map((crumb, i) => (
              <li key={i}>
                {crumb.to ? <a href={crumb.to}>{crumb.text}</a> : <span aria-current="page">{crumb.text}</span>}
              </li>
            ))}
          </ol>
        </nav>
        {source && (
          <nav class="tabs" aria-label="Pages of this run">
            {tab(links.run(source), "Overview")}
            {tab(links.episodes(source), "Episodes")}
            {tab(links.inFlight(source), "In flight")}
            {tab(links.compare(source), "Compare")}
          </nav>
        )}
        <div class="tools">
          <fieldset class="choice" aria-label="Theme">
            {THEMES.map((one) => (
              <button
                key={one.value}
                type="button"
                title={one.title}
                aria-pressed={theme.value === one.value}
                onClick={() => {
                  theme.value = one.value;
                }}
              >
                {one.text}
              </button>
            ))}
          </fieldset>
          <button type="button" onClick={() => setHelpOpen(true)} title="Keys (?)">
            <kbd>?</kbd> Keys
          </button>
        </div>
      </header>
      <main id="main" tabIndex={-1}>
        {props.children}
      </main>
      {isHelpOpen && <Help close={() => setHelpOpen(false)} />}
    </>
  );
}
