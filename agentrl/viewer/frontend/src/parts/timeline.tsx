/**
 * Where the time of an episode went: one bar per turn, divided by activity. Without the turns' start times, which older
 * runs did not store, each begins where the one before it ends.
 */
import { seconds, whole } from "../base/format";
import { ACTIVITIES, type Turn } from "../base/types";
import { turnName, turnSeconds } from "./turn";

export function Timeline({ turns, open }: { turns: Turn[]; open: (turn: number) => void }) {
  const timed = turns.filter((turn) => turn.number !== null && turnSeconds(turn) !== null);
  const hasStarts = timed.every((turn) => turn.timings?.started != null);
  let clock = 0;
  const rows = timed.map((turn) => {
    const length = turnSeconds(turn) ?? 0;
    const start = hasStarts ? (turn.timings?.started ?? 0) : clock;
    clock = start + length;
    return { turn, start, length };
  });
  const total = Math.max(1e-9, ...rows.map((row) => row.start + row.length));
  const sums = ACTIVITIES.map((name) => timed.reduce((sum, turn) => sum + (turn.timings?.[name] ?? 0), 0));
  const share = (value: number) => `${(100 * value) / total}%`;
  if (!timed.length) return <p class="muted">This episode has no times.</p>;
  return (
    <div class="timeline">
      <ul class="legend">
        {ACTIVITIES.map((name, i) => (
          <li key={name}>
            <span class={`activity ${name}`} aria-hidden="true" />
            <span class="name">{name}</span>
            <span class="value">{seconds(sums[i])}</span>
          </li>
        ))}
      </ul>
      <table>
        <thead>
          <tr>
            <th scope="col">Turn</th>
            <th scope="col" class="wide">
              <span>0</span>
              <span>{seconds(total / 2)}</span>
              <span>{seconds(total)}</span>
            </th>
            {hasStarts && (
              <th scope="col" class="number" title="Seconds from the beginning of the episode">
                Start
              </th>
            )}
            <th scope="col" class="number">
              Tokens
            </th>
            {ACTIVITIES.map((name) => (
              <th key={name} scope="col" class="number">
                {name}
              </th>
            ))}
            <th scope="col" class="number">
              Total
            </th>
          </tr>
        </thead>
        <tbody>
          {rows.map(({ turn, start, length }) => (
            <tr key={turn.number}>
              <th scope="row">
                <button type="button" class="link" onClick={() => open(turn.number ?? 0)}>
                  {turnName(turn.number)}
                </button>
              </th>
              <td class="wide">
                <div class="bar" style={{ marginLeft: share(start), width: share(length) }}>
                  {ACTIVITIES.map((name) => {
                    const part = turn.timings?.[name] ?? 0;
                    if (!part) return null;
                    const width = `${(100 * part) / length}%`;
                    return (
                      <span
                        key={name}
                        class={`activity ${name}`}
                        style={{ width }}
                        title={`${name}: ${seconds(part)}`}
                      />
                    );
                  })}
                </div>
              </td>
              {hasStarts && <td class="number">{seconds(start)}</td>}
              <td class="number">{turn.start !== null && turn.end !== null ? whole(turn.end - turn.start) : "–"}</td>
              {ACTIVITIES.map((name) => (
                <td key={name} class="number">
                  {seconds(turn.timings?.[name])}
                </td>
              ))}
              <td class="number">{seconds(length)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
