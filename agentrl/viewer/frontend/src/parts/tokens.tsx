/** The token view: every token of a sequence, coloured by an overlay; only those near the screen have elements. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { ApiError, api, get } from "../base/api";
import { fixed, num, percent, signed, whole } from "../base/format";
import { visible } from "../base/text";
import type { TokenColumns } from "../base/types";
import { Fact, Facts } from "./common";
import { memo } from "./memo";
import type { Overlay } from "./overlays";
import { turnName } from "./turn";

const PAGE = 4000;
const CHUNK = 256;

export interface LoadedTokens {
  columns: TokenColumns | null;
  error: ApiError | null;
  isComplete: boolean;
}

/** Load the tokens of a sequence page by page; the first page is shown while the others come. */
export function useTokens(source: string, episode: string, sequence: number, count: number): LoadedTokens {
  const key = `${source} ${episode} ${sequence} ${count}`;
  const [state, setState] = useState<LoadedTokens & { key: string }>({
    key: "",
    columns: null,
    error: null,
    isComplete: false,
  });
  useEffect(() => {
    const abort = new AbortController();
    const load = async () => {
      let columns: TokenColumns | null = null;
      for (let from = 0; from === 0 || from < count; from += PAGE) {
        const query = `sequence=${sequence}&from=${from}&to=${Math.min(from + PAGE, Math.max(count, 1))}`;
        const page: TokenColumns = await get(`${api(source, "episode", episode, "tokens")}?${query}`, abort.signal);
        columns = columns === null ? page : joined(columns, page);
        setState({ key, columns, error: null, isComplete: from + PAGE >= count });
      }
    };
    load().catch((error: unknown) => {
      if (abort.signal.aborted) return;
      const known = error instanceof ApiError ? error : new ApiError(String(error), null, 0);
      setState((old) => ({ ...old, key, columns: old.key === key ? old.columns : null, error: known }));
    });
    return () => abort.abort();
  }, [key, source, episode, sequence, count]);
  return state.key === key ? state : { columns: null, error: null, isComplete: false };
}

function joined(a: TokenColumns, b: TokenColumns): TokenColumns {
  const result = { ...a } as Record<string, unknown>;
  for (const [name, more] of Object.entries(b)) {
    if (name === "sources") continue;
    const old = (a as unknown as Record<string, unknown[] | null>)[name];
    if (Array.isArray(more)) result[name] = [...(old ?? Array<null>(a.id.length).fill(null)), ...more];
    else if (Array.isArray(old)) result[name] = [...old, ...Array<null>(b.id.length).fill(null)];
  }
  return result as unknown as TokenColumns;
}

interface Chunk {
  start: number;
  end: number;
}

interface Block {
  turn: number | null;
  source: string;
  chunks: Chunk[];
}

/** Divide a sequence where turns and sources change, and long pieces into chunks, at line ends if possible. */
function blocksOf(columns: TokenColumns): Block[] {
  const blocks: Block[] = [];
  let chunk: Chunk = { start: 0, end: 0 };
  const count = columns.id.length;
  for (let i = 0; i < count; i++) {
    const turn = columns.turn?.[i] ?? null;
    const block = blocks.at(-1);
    const isOwn = columns.sources[columns.source[i] ?? 0] === "sampled";
    const source = isOwn ? "sampled" : "other";
    if (!block || block.turn !== turn || block.source !== source) {
      chunk = { start: i, end: i };
      blocks.push({ turn, source, chunks: [chunk] });
    } else if (i - chunk.start >= 2 * CHUNK || (i - chunk.start >= CHUNK && columns.text[i - 1]?.endsWith("\n"))) {
      chunk = { start: i, end: i };
      block.chunks.push(chunk);
    }
    chunk.end = i + 1;
  }
  return blocks;
}

export interface TokenOptions {
  showsWhitespace: boolean;
  showsValues: boolean;
}

/** Return the text to show for a token: spaces and line ends become visible if wanted. */
function shownText(text: string, showsWhitespace: boolean): string {
  if (text === "") return "◌"; // a part of a character, whose text is at its last token
  if (!showsWhitespace) return text;
  return text.replaceAll(" ", "·").replaceAll("\t", "→\t").replaceAll("\n", "⏎\n");
}

interface ChunkProps {
  columns: TokenColumns;
  start: number;
  end: number;
  overlay: Overlay;
  selected: number;
  /** True for the first chunk of a block, whose first line end is shown as a mark. */
  isFirst: boolean;
  showsWhitespace: boolean;
  showsValues: boolean;
}

const TokenChunk = memo(function TokenChunk(props: ChunkProps) {
  const { columns, start, end, overlay, selected, isFirst, showsWhitespace, showsValues } = props;
  const host = useRef<HTMLSpanElement>(null);
  const [isNear, setNear] = useState(start === 0);
  useEffect(() => {
    if (!host.current) return;
    const watch = new IntersectionObserver((entries) => setNear(entries.some((e) => e.isIntersecting)), {
      rootMargin: "1200px",
    });
    watch.observe(host.current);
    return () => watch.disconnect();
  }, []);
  const holdsSelected = selected >= start && selected < end;
  const indices = Array.from({ length: end - start }, (_, i) => start + i);
  const texts = indices.map((i) => shownText(columns.text[i] ?? "", showsWhitespace));
  if (isFirst && start > 0) texts[0] = texts[0]?.replace(/^⏎?\n/, "⏎") ?? "";
  return (
    <span ref={host} class="chunk" data-start={start}>
      {isNear || holdsSelected
        ? indices.map((i) => {
            const special = columns.special[i] ? " special" : "";
            const mark = i === selected ? " selected" : "";
            return (
              <span
                key={i}
                class={`t ${overlay.styles[i] ?? ""}${special}${mark}`}
                data-i={i}
                data-v={showsValues ? overlay.values[i] || undefined : undefined}
              >
                {visible(texts[i - start] ?? "")}
              </span>
            );
          })
        : texts.join("")}
    </span>
  );
});

const LONG_INPUT = 240;

interface BlockProps {
  block: Block;
  columns: TokenColumns;
  overlay: Overlay;
  options: TokenOptions;
  selected: number | null;
}

/** Tokens of a turn that were not sampled were written for the policy. */
function nameOf(block: Block, start: number): string {
  if (block.source === "sampled") return turnName(block.turn);
  if (block.turn !== null) return `${turnName(block.turn)}, given`;
  return start === 0 ? "Prompt" : "Input";
}

/** A turn's answer, or what the model read before it. Long inputs are folded unless they hold the chosen token. */
function BlockView({ block, columns, overlay, options, selected }: BlockProps) {
  const [isOpen, setOpen] = useState(false);
  const start = block.chunks[0]?.start ?? 0;
  const end = block.chunks.at(-1)?.end ?? start;
  const isSampled = block.source === "sampled";
  const holdsSelected = selected !== null && selected >= start && selected < end;
  const isFolded = !isSampled && end - start > LONG_INPUT && !isOpen && !holdsSelected;
  return (
    <section
      class={`token-block ${block.source}`}
      data-turn={block.turn ?? undefined}
      aria-label={isSampled ? turnName(block.turn) : `${nameOf(block, start)}: tokens ${start} to ${end - 1}`}
    >
      <div class="gutter">
        <strong>{nameOf(block, start)}</strong>
        <span>
          {start}–{end - 1}
        </span>
        <span>{whole(end - start)} tok</span>
      </div>
      <div>
        <div class={`stream${isFolded ? " folded" : ""}`}>
          {block.chunks.map((chunk) => (
            <TokenChunk
              key={chunk.start}
              columns={columns}
              start={chunk.start}
              end={chunk.end}
              isFirst={chunk.start === start}
              overlay={overlay}
              selected={selected !== null && selected >= chunk.start && selected < chunk.end ? selected : -1}
              showsWhitespace={options.showsWhitespace}
              showsValues={options.showsValues}
            />
          ))}
        </div>
        {isFolded && (
          <button type="button" class="more" onClick={() => setOpen(true)}>
            Show all {whole(end - start)} tokens of this input
          </button>
        )}
      </div>
    </section>
  );
}

interface TokenTextProps {
  columns: TokenColumns;
  overlay: Overlay;
  options: TokenOptions;
  selected: number | null;
  select: (token: number) => void;
  hover: (token: number | null) => void;
}

export function TokenText({ columns, overlay, options, selected, select, hover }: TokenTextProps) {
  const host = useRef<HTMLDivElement>(null);
  const blocks = useMemo(() => blocksOf(columns), [columns]);
  useEffect(() => {
    if (selected === null) return;
    const token = host.current?.querySelector(`[data-i="${selected}"]`);
    token?.scrollIntoView({ block: "nearest" });
  }, [selected, columns]);
  const indexAt = (event: Event) => {
    const token = (event.target as Element).closest<HTMLElement>("[data-i]");
    return token ? Number(token.dataset.i) : null;
  };
  return (
    // biome-ignore lint/a11y/noStaticElementInteractions: the arrow keys move the chosen token (see the page's keys)
    // biome-ignore lint/a11y/useKeyWithClickEvents: as above
    // biome-ignore lint/a11y/useKeyWithMouseEvents: as above
    <div
      ref={host}
      class="tokens"
      onMouseOver={(event) => hover(indexAt(event))}
      onMouseLeave={() => hover(null)}
      onClick={(event) => {
        const token = indexAt(event);
        if (token !== null && getSelection()?.isCollapsed !== false) select(token);
      }}
    >
      {blocks.map((block) => (
        <BlockView
          key={block.chunks[0]?.start ?? 0}
          block={block}
          columns={columns}
          overlay={overlay}
          options={options}
          selected={selected}
        />
      ))}
    </div>
  );
}

/** All values of one token. */
export function TokenCard({ columns, token }: { columns: TokenColumns; token: number | null }) {
  if (token === null || token >= columns.id.length) {
    return (
      <section class="card token-card" aria-label="Token">
        <h2>Token</h2>
        <p class="muted">
          Point at a token, click one, or press <kbd>→</kbd>.
        </p>
      </section>
    );
  }
  const text = columns.text[token] ?? "";
  const logprob = columns.logprob?.[token] ?? null;
  const trainer = columns.trainer_logprob?.[token] ?? null;
  const version = columns.version?.[token] ?? null;
  const turn = columns.turn?.[token] ?? null;
  const masked = columns.masked_by?.[token] ?? null;
  const isSampled = columns.sources[columns.source[token] ?? 0] === "sampled";
  return (
    <section class="card token-card" aria-label="Token" aria-live="polite">
      <h2>
        Token <span class="figure">{token}</span>
      </h2>
      <p class="token-text">
        <code>{visible(JSON.stringify(text))}</code>
        {columns.special[token] ? <span class="badge">special</span> : null}
      </p>
      <Facts>
        <Fact name="Id">{columns.id[token]}</Fact>
        <Fact name="Turn">{turn === null ? "prompt" : turn + 1}</Fact>
        <Fact name="Source">{columns.sources[columns.source[token] ?? 0]}</Fact>
        <Fact name="In the loss">{masked ? `✕ ${masked}` : columns.trained[token] ? "✓ yes" : "no"}</Fact>
        {isSampled && (
          <>
            <Fact name="Probability">{logprob === null ? num(null) : percent(Math.exp(logprob), 2)}</Fact>
            <Fact name="Log-probability, engine">{fixed(logprob, 4)}</Fact>
            <Fact name="Log-probability, trainer">{fixed(trainer, 4)}</Fact>
            <Fact name="Ratio">{fixed(columns.ratio?.[token], 4)}</Fact>
            <Fact name="Advantage">{signed(columns.advantage?.[token], 4)}</Fact>
            <Fact name="Entropy">{fixed(columns.entropy?.[token], 4)}</Fact>
            <Fact name="Weight version">{version === null || version < 0 ? num(null) : version}</Fact>
            <Fact name="Clipped">{columns.clipped ? (columns.clipped[token] ? "▲ yes" : "no") : num(null)}</Fact>
          </>
        )}
      </Facts>
    </section>
  );
}

export function OverlayLegend({ overlay }: { overlay: Overlay }) {
  return (
    <ul class="overlay-legend" aria-label="Legend">
      {overlay.legend.map((entry) => (
        <li key={`${entry.style} ${entry.text}`}>
          <span class={`t ${entry.style}`} aria-hidden="true">
            token
          </span>
          <span>{entry.text}</span>
          <span class="muted">{whole(entry.count)}</span>
        </li>
      ))}
    </ul>
  );
}
