/** The filters of the table of episodes. Their values are the parameters of the page's address. */
import { useEffect, useRef, useState } from "preact/hooks";
import { words } from "../base/format";
import { navigate, setQuery, url } from "../base/router";
import type { EpisodePage } from "../base/types";

const PAUSE = 250;

/** A field whose value goes into the address shortly after typing. */
function Field(props: {
  name: string;
  label: string;
  type: "search" | "number" | "text";
  hidesLabel?: boolean;
  hint?: string;
}) {
  const inAddress = url.value.searchParams.get(props.name) ?? "";
  const [value, setValue] = useState(inAddress);
  const timer = useRef<ReturnType<typeof setTimeout> | null>(null);
  useEffect(() => setValue(inAddress), [inAddress]);
  const change = (next: string) => {
    setValue(next);
    if (timer.current) clearTimeout(timer.current);
    timer.current = setTimeout(() => setQuery({ [props.name]: next }), PAUSE);
  };
  return (
    <label class="field">
      <span class={props.hidesLabel ? "sr" : ""}>{props.label}</span>
      <input
        id={`filter-${props.name}`}
        type={props.type as "text"}
        inputMode={props.type === "number" ? "decimal" : "text"}
        value={value}
        placeholder={props.hint}
        onInput={(event) => change(event.currentTarget.value)}
      />
    </label>
  );
}

function Range({ name, label }: { name: string; label: string }) {
  return (
    <fieldset class="range">
      <legend class="sr">{label}</legend>
      <span aria-hidden="true">{label}</span>
      <Field name={`${name}_from`} label={`${label}, from`} type="number" hidesLabel hint="from" />
      <span aria-hidden="true">–</span>
      <Field name={`${name}_to`} label={`${label}, to`} type="number" hidesLabel hint="to" />
    </fieldset>
  );
}

function Select({ name, label, options }: { name: string; label: string; options: string[] }) {
  const value = url.value.searchParams.get(name) ?? "";
  const all = value && !options.includes(value) ? [value, ...options] : options;
  return (
    <label class="field">
      <span>{label}</span>
      <select
        id={`filter-${name}`}
        value={value}
        disabled={!all.length}
        onChange={(event) => setQuery({ [name]: event.currentTarget.value })}
      >
        <option value="">any</option>
        {all.map((one) => (
          <option key={one} value={one}>
            {one}
          </option>
        ))}
      </select>
    </label>
  );
}

function Flag({ name, label }: { name: string; label: string }) {
  return (
    <label class="check">
      <input
        id={`filter-${name}`}
        type="checkbox"
        checked={url.value.searchParams.get(name) === "true"}
        onChange={(event) => setQuery({ [name]: event.currentTarget.checked })}
      />
      {label}
    </label>
  );
}

function OutcomeFilter({ outcomes }: { outcomes: string[] }) {
  const chosen = url.value.searchParams.getAll("outcome");
  const all = [...new Set([...chosen, ...outcomes])];
  const toggle = (one: string) =>
    setQuery({ outcome: chosen.includes(one) ? chosen.filter((other) => other !== one) : [...chosen, one] });
  if (!all.length) return null;
  return (
    <fieldset>
      <legend>Outcome</legend>
      {all.map((one) => (
        <label key={one} class="check">
          <input type="checkbox" checked={chosen.includes(one)} onChange={() => toggle(one)} />
          {words(one)}
        </label>
      ))}
    </fieldset>
  );
}

function SuccessFilter() {
  const value = url.value.searchParams.get("success") ?? "";
  return (
    <fieldset>
      <legend>Success</legend>
      {[
        ["", "any"],
        ["true", "✓ solved"],
        ["false", "✕ not solved"],
      ].map(([one, text]) => (
        <label key={one} class="check">
          <input
            type="radio"
            name="success"
            checked={value === one}
            onChange={() => setQuery({ success: one ?? null })}
          />
          {text}
        </label>
      ))}
    </fieldset>
  );
}

export function Filters({ facets }: { facets: EpisodePage["facets"] | null }) {
  const names = [...url.value.searchParams.keys()].filter((name) => name !== "order" && name !== "descending");
  const clear = () => navigate(url.peek().pathname);
  return (
    <aside id="filters" class="sidebar" aria-label="Filters">
      <div class="sidebar-head">
        <h2>Filters {names.length > 0 && <span class="count">{names.length}</span>}</h2>
        <button type="button" class="link" onClick={clear} disabled={!names.length}>
          Clear
        </button>
      </div>
      <Field name="text" label="Text in any turn" type="search" hint="word or phrase" />
      <div class="columns">
        <Range name="step" label="Step" />
        <Range name="reward" label="Reward" />
        <Range name="turns" label="Turns" />
        <Range name="tokens" label="Tokens" />
      </div>
      <SuccessFilter />
      <OutcomeFilter outcomes={facets?.outcomes ?? []} />
      <fieldset>
        <legend>Only with</legend>
        <Flag name="invalid" label="invalid call" />
        <Flag name="truncated" label="truncated" />
      </fieldset>
      <Select name="environment" label="Environment" options={facets?.environments ?? []} />
      <Select name="task_type" label="Task type" options={facets?.task_types ?? []} />
      <Select name="split" label="Split" options={facets?.splits ?? []} />
      <Select name="role" label="Role" options={facets?.roles ?? []} />
      <Field name="task" label="Task id" type="text" />
      <Field name="group" label="Group id" type="text" />
    </aside>
  );
}
