/** Text that a model, a tool or an environment wrote: always text nodes, with invisible characters made visible. */
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { whole } from "./format";

// C0 and C1 controls except tab and line feed, soft hyphen, zero-width and bidirectional characters, byte order mark, tags.
const HIDDEN =
  // biome-ignore lint/suspicious/noControlCharactersInRegex: these are what is looked for
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu;

const NAMES: Record<string, string> = {
  "\u001b": "ESC",
  "\u0000": "NUL",
  "\r": "CR",
  "\u0007": "BEL",
  "\u0008": "BS",
  "\u00ad": "SHY",
  "\u200b": "ZWSP",
  "\u200c": "ZWNJ",
  "\u200d": "ZWJ",
  "\u200e": "LRM",
  "\u200f": "RLM",
  "\u202a": "LRE",
  "\u202b": "RLE",
  "\u202c": "PDF",
  "\u202d": "LRO",
  "\u202e": "RLO",
  "\u2066": "LRI",
  "\u2067": "RLI",
  "\u2068": "FSI",
  "\u2069": "PDI",
  "\ufeff": "BOM",
};

const codePoint = (character: string) =>
  `U+${(character.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, "0")}`;

/** Split a text into plain pieces and marks for hidden characters. Joiners inside emoji stay as they are. */
export function visible(text: string): ComponentChildren {
  const matches = [...text.matchAll(HIDDEN)];
  if (!matches.length) return text;
  const pieces: ComponentChildren[] = [];
  let from = 0;
  for (const match of matches) {
    const before = text.slice(from, match.index);
    if (match[0] === "\u200d" && /\p{Extended_Pictographic}\ufe0f?$/u.test(before)) continue;
    if (before) pieces.push(before);
    pieces.push(
      <span class="hidden-char" title={`${codePoint(match[0])}: a character that is not visible`}>
        {NAMES[match[0]] ?? codePoint(match[0])}
      </span>,
    );
    from = match.index + match[0].length;
  }
  pieces.push(text.slice(from));
  return pieces;
}

const LIMIT = 6000;

/** A text block. Long texts show their beginning and end until they are opened. */
export function TextBlock({ text, class: name = "" }: { text: string; class?: string }) {
  const [isOpen, setOpen] = useState(false);
  if (text.length <= LIMIT || isOpen) return <pre class={`text ${name}`}>{visible(text)}</pre>;
  const head = text.slice(0, LIMIT * 0.6);
  const tail = text.slice(-LIMIT * 0.2);
  return (
    <div>
      <pre class={`text ${name}`}>{visible(head)}</pre>
      <button type="button" class="more" onClick={() => setOpen(true)}>
        Show {whole(text.length - head.length - tail.length)} more characters
      </button>
      <pre class={`text ${name}`}>{visible(tail)}</pre>
    </div>
  );
}

/** One line of a text that others wrote, for tables and headings. */
export function Inline({ text }: { text: string }) {
  return <bdi>{visible(text.replace(/\s+/g, " "))}</bdi>;
}
