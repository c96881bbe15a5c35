/** One turn as a reader sees it: thinking folded, tool calls as name and arguments, results set apart. */

import { num, seconds } from "../base/format";
import { BASE } from "../base/router";
import { Inline, TextBlock } from "../base/text";
import type { Part, Turn } from "../base/types";
import { memo } from "./memo";

const LABELS: Record<Part["kind"], { mark: string; text: string }> = {
  system: { mark: "§", text: "system" },
  user: { mark: "›", text: "user" },
  assistant: { mark: "◆", text: "answer" },
  thinking: { mark: "∴", text: "thinking" },
  tool_call: { mark: "ƒ", text: "tool call" },
  tool_result: { mark: "↳", text: "tool result" },
  observation: { mark: "◎", text: "observation" },
  remark: { mark: "!", text: "runtime" },
  image: { mark: "▣", text: "image" },
};

function argumentText(value: unknown): string {
  return typeof value === "string" ? value : (JSON.stringify(value, null, 2) ?? "");
}

function Arguments({ value }: { value: unknown }) {
  if (value === null || value === undefined) return <span class="muted">no arguments</span>;
  if (typeof value !== "object" || Array.isArray(value)) return <TextBlock text={argumentText(value)} />;
  const entries = Object.entries(value);
  if (!entries.length) return <span class="muted">no arguments</span>;
  return (
    <dl class="arguments">
      {entries.map(([name, one]) => (
        <div key={name}>
          <dt>
            <Inline text={name} />
          </dt>
          <dd>
            <TextBlock text={argumentText(one)} />
          </dd>
        </div>
      ))}
    </dl>
  );
}

function Image({ part }: { part: Part }) {
  const data = part.data ?? "";
  if (!/^(data:image\/|\/api\/)/.test(data)) return <p class="muted">The image is not stored.</p>;
  return (
    <img
      class="picture"
      src={data.startsWith("/") ? BASE + data : data}
      alt={part.text || "Image that the policy saw"}
      loading="lazy"
    />
  );
}

function Label({ part }: { part: Part }) {
  const { mark, text } = LABELS[part.kind] ?? { mark: "·", text: part.kind };
  return (
    <span class="label">
      <span aria-hidden="true">{mark}</span> {text}
      {part.invalid && <span class="bad">✕ invalid</span>}
    </span>
  );
}

function PartView({ part }: { part: Part }) {
  const text = part.text ?? "";
  const kind = `part ${part.kind.replace("_", "-")}${part.invalid ? " invalid" : ""}`;
  if (part.kind === "thinking") {
    const count = text.split(/\s+/).filter(Boolean).length;
    return (
      <details class={kind}>
        <summary>
          <Label part={part} /> <span class="muted">{count} words</span>
        </summary>
        <TextBlock text={text} />
      </details>
    );
  }
  return (
    <div class={kind}>
      <Label part={part} />
      <div class="body">
        {part.name && (
          <code class="name">
            <Inline text={part.name} />
          </code>
        )}
        {part.kind === "tool_call" && <Arguments value={part.arguments} />}
        {part.kind === "image" ? <Image part={part} /> : text && <TextBlock text={text} />}
        {part.kind === "assistant" && !text && <span class="muted">No text that could be read: see the tokens.</span>}
      </div>
    </div>
  );
}

export const turnName = (number: number | null) => (number === null ? "Prompt" : `Turn ${number + 1}`);

export function turnSeconds(turn: Turn): number | null {
  const known = Object.entries(turn.timings ?? {}).flatMap(([name, value]) =>
    name === "started" || value === null || value === undefined ? [] : [value],
  );
  return known.length ? known.reduce((sum, value) => sum + value, 0) : null;
}

const ANSWERS = new Set<Part["kind"]>(["assistant", "thinking", "tool_call"]);

/** Return the turns with what the model read before its first answer as an entry of its own, whose number is null. */
export function withPrompt(turns: Turn[]): Turn[] {
  const [first, ...rest] = turns;
  if (!first || first.number === null) return turns;
  const start = first.parts.findIndex((part) => ANSWERS.has(part.kind));
  if (start <= 0) return turns;
  const nothing = { timings: null, version: null, finish_reason: null, reward: null, invalid: false, error: null };
  const prompt = {
    ...nothing,
    number: null,
    role: "prompt",
    start: null,
    end: null,
    parts: first.parts.slice(0, start),
  };
  return [prompt, { ...first, parts: first.parts.slice(start) }, ...rest];
}

interface TurnProps {
  turn: Turn;
  isCurrent?: boolean;
  isParting?: boolean;
  /** Whose turn it is, where several episodes are on the page. */
  owner?: string;
  link?: string;
  tokensLink?: string;
}

/** A whole turn. It is drawn again only when its data or marks change. */
export const TurnView = memo(function TurnView({ turn, isCurrent, isParting, owner, link, tokensLink }: TurnProps) {
  const duration = turnSeconds(turn);
  return (
    <section
      class={`turn${isCurrent ? " current" : ""}${turn.invalid ? " invalid" : ""}`}
      id={turn.number === null || owner ? undefined : `turn-${turn.number}`}
      aria-label={owner ? `${owner}: ${turnName(turn.number)}` : turnName(turn.number)}
    >
      <header>
        <h2>{link ? <a href={link}>{turnName(turn.number)}</a> : turnName(turn.number)}</h2>
        {turn.number !== null && <span class="role">{turn.role}</span>}
        {turn.invalid && <span class="bad">✕ invalid call</span>}
        {isParting && <span class="parting">≠ parts here</span>}
        {turn.finish_reason && turn.finish_reason !== "stop" && <span class="warn">▲ {turn.finish_reason}</span>}
        <span class="figures">
          {turn.reward !== null && turn.reward !== 0 && (
            <span title="Reward of this turn">reward {num(turn.reward)}</span>
          )}
          {turn.version !== null && <span title="Weight version that answered">v{turn.version}</span>}
          {duration !== null && <span title="Time of this turn">{seconds(duration)}</span>}
          {turn.start !== null && turn.end !== null && (
            <span title="Sampled tokens">
              {tokensLink ? <a href={tokensLink}>{turn.end - turn.start} tokens</a> : `${turn.end - turn.start} tokens`}
            </span>
          )}
        </span>
      </header>
      {turn.error && (
        <p class="error">
          ✕ <Inline text={turn.error} />
        </p>
      )}
      {turn.parts.map((part, i) => (
        <PartView key={i} part={part} />
      ))}
      {!turn.parts.length && <p class="muted">This turn has no text.</p>}
    </section>
  );
});
