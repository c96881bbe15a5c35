/** The token view of an episode: the choice of an overlay, its legend, the tokens, and the card of one token. */
import { useEffect, useMemo, useState } from "preact/hooks";
import { percent, whole } from "../base/format";
import { useKeys } from "../base/keys";
import { setQuery } from "../base/router";
import type { Episode } from "../base/types";
import { Choice, Empty, Failure, Loading } from "./common";
import { EpisodeFacts } from "./episode_side";
import { hasOverlay, OVERLAY_TEXT, OVERLAYS, type OverlayName, overlay } from "./overlays";
import { OverlayLegend, TokenCard, TokenText, useTokens } from "./tokens";

interface PanelProps {
  source: string;
  episode: Episode;
  sequence: number;
  token: number | null;
  turn: number | null;
  overlay: OverlayName;
}

export function TokenPanel({ source, episode, sequence, token, turn, overlay: name }: PanelProps) {
  const count = episode.sequences[sequence]?.tokens ?? 0;
  const { columns, error, isComplete } = useTokens(source, episode.row.id, sequence, count);
  const [hovered, setHovered] = useState<number | null>(null);
  const [options, setOptions] = useState({ showsWhitespace: false, showsValues: false });
  const shown = useMemo(() => (columns ? overlay(columns, name) : null), [columns, name]);
  const select = (to: number) => setQuery({ token: to, turn: columns?.turn?.[to] ?? null, overlay: name, view: null });
  const choose = (to: OverlayName) => setQuery({ overlay: to, view: null });
  const available = columns ? OVERLAYS.filter((one) => hasOverlay(columns, one)) : OVERLAYS;
  const cycle = (by: number) => {
    const next = available[(available.indexOf(name) + by + available.length) % available.length];
    if (next) choose(next);
  };
  const move = (by: number) => {
    if (!columns) return;
    const first = columns.source.findIndex((s) => columns.sources[s] === "sampled");
    const from = token ?? (by > 0 ? Math.max(0, first) - 1 : first + 1);
    select(Math.max(0, Math.min(columns.id.length - 1, from + by)));
  };
  const isReady = columns !== null;
  // Only when the tokens are there
  useEffect(() => {
    if (!isReady || token !== null || turn === null) return;
    document.querySelector(`[data-turn="${turn}"].sampled`)?.scrollIntoView({ block: "start" });
  }, [isReady]);
  useKeys([
    { keys: "ArrowRight", help: "Next token", run: () => move(1) },
    { keys: "ArrowLeft", help: "Previous token", run: () => move(-1) },
    { keys: "o", help: "Next overlay", run: () => cycle(1) },
    { keys: "O", help: "Previous overlay", run: () => cycle(-1) },
    { keys: "w", help: "Spaces and line ends", run: () => toggle("showsWhitespace") },
    { keys: "v", help: "Values beside the tokens", run: () => toggle("showsValues") },
    { keys: "Escape", help: "Let go of the token", run: () => setQuery({ token: null, overlay: name }) },
  ]);
  const toggle = (one: "showsWhitespace" | "showsValues") => setOptions((old) => ({ ...old, [one]: !old[one] }));
  if (error && !columns) return <Failure error={error} />;
  if (!columns || !shown) return <Loading what="the tokens" />;
  if (!columns.id.length)
    return <Empty title="This sequence has no tokens.">A chat service answered, or nothing was sampled.</Empty>;
  return (
    <div class="episode-body tokens-view">
      <div class="content">
        <div class="overlay-bar">
          <Choice
            label="Overlay"
            options={OVERLAYS.map((value) => ({
              value,
              text: OVERLAY_TEXT[value].text,
              title: available.includes(value)
                ? OVERLAY_TEXT[value].title
                : "The run stored no such values for this episode (observe.tokens)",
              isDisabled: !available.includes(value),
            }))}
            value={name}
            choose={choose}
          />
          <label>
            <input type="checkbox" checked={options.showsWhitespace} onChange={() => toggle("showsWhitespace")} />
            Whitespace
          </label>
          <label>
            <input type="checkbox" checked={options.showsValues} onChange={() => toggle("showsValues")} />
            Values
          </label>
          <OverlayLegend overlay={shown} />
        </div>
        {!isComplete && (
          <p class="muted" role="status">
            {whole(columns.id.length)} of {whole(count)} tokens ({percent(columns.id.length / count, 0)})
          </p>
        )}
        {error && <Failure error={error} />}
        {[columns.tokenizer_problem, columns.overlay_problem].map(
          (problem) => problem && <p class="error">▲ {problem}</p>,
        )}
        <TokenText
          columns={columns}
          overlay={shown}
          options={options}
          selected={token}
          select={select}
          hover={setHovered}
        />
      </div>
      <aside class="side" aria-label="About the token and the episode">
        <TokenCard columns={columns} token={hovered ?? token} />
        <EpisodeFacts source={source} episode={episode} />
      </aside>
    </div>
  );
}
