/** Episodes of one task beside each other, turn by turn. */
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { Episode } from "../base/types";
import { TurnView, withPrompt } from "./turn";

export interface Side {
  key: string;
  head: ComponentChildren;
  episode: Episode;
  partsAt?: number | null;
}

function shared(count: number): string {
  if (count === 1) return "the prompt";
  return count === 2 ? "the prompt and 1 turn" : `the prompt and ${count - 1} turns`;
}

/** Show several episodes; `foldBefore` is the turn before which all say the same, which is folded. */
export function SideBySide({ sides, foldBefore = null }: { sides: Side[]; foldBefore?: number | null }) {
  const [isUnfolded, setUnfolded] = useState(false);
  const turns = sides.map((side) => side.episode.sequences.flatMap((sequence) => withPrompt(sequence.turns)));
  const length = Math.max(0, ...turns.map((one) => one.length));
  const place = foldBefore === null ? -1 : (turns[0]?.findIndex((turn) => turn.number === foldBefore) ?? -1);
  const first = isUnfolded ? 0 : Math.max(0, place);
  return (
    <div class="side-by-side" style={{ gridTemplateColumns: `repeat(${sides.length}, minmax(340px, 1fr))` }}>
      {sides.map((side) => (
        <div key={side.key} class="side-head">
          {side.head}
        </div>
      ))}
      {first > 0 && (
        <button type="button" class="more fold" onClick={() => setUnfolded(true)}>
          Show what all of them read and said before: {shared(first)}
        </button>
      )}
      {Array.from({ length: length - first }, (_, row) =>
        sides.map((side, s) => {
          const i = first + row;
          const turn = turns[s]?.[i];
          return (
            <div key={`${side.key} ${i}`} class="cell">
              {turn && (
                <TurnView
                  turn={turn}
                  owner={side.key}
                  isParting={side.partsAt !== undefined && side.partsAt !== null && turn.number === side.partsAt}
                />
              )}
            </div>
          );
        }),
      )}
    </div>
  );
}
