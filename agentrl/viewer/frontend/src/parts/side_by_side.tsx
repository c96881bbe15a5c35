/** Episodes of one task beside each other, turn by turn. */
import type { ComponentChildren } from "preact";
import type { Episode } from "../base/types";
import { TurnView, withPrompt } from "./turn";

export interface Side {
  key: string;
  head: ComponentChildren;
  episode: Episode;
  partsAt?: number | null;
}

export function SideBySide({ sides }: { sides: Side[] }) {
  const turns = sides.map((side) => side.episode.sequences.flatMap((sequence) => withPrompt(sequence.turns)));
  const length = Math.max(0, ...turns.map((one) => one.length));
  return (
    <div class="side-by-side" style={{ gridTemplateColumns: `repeat(${sides.length}, minmax(340px, 1fr))` }}>
      {sides.map((side) => (
        <div key={side.key} class="side-head">
          {side.head}
        </div>
      ))}
      {Array.from({ length }, (_, i) =>
        sides.map((side, s) => {
          const turn = turns[s]?.[i];
          return (
            <div key={`${side.key} ${i}`} class="cell">
              {turn && (
                <TurnView
                  turn={turn}
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
