/** What is known about an episode, and its notes. */
import { useState } from "preact/hooks";
import { ApiError, api, post, remove } from "../base/api";
import { ago, dateTime, fixed, num, seconds, whole, words } from "../base/format";
import { links } from "../base/router";
import { Inline, TextBlock } from "../base/text";
import type { Episode } from "../base/types";
import { Fact, Facts, Failure, Outcome, Success } from "./common";
import { turnName } from "./turn";

export function EpisodeFacts({ source, episode }: { source: string; episode: Episode }) {
  const { row } = episode;
  const versions =
    row.oldest_version === row.newest_version
      ? num(row.newest_version)
      : `${num(row.oldest_version)} to ${num(row.newest_version)}`;
  return (
    <section class="card" aria-label="Episode">
      <h2>Episode</h2>
      <Facts>
        <Fact name="Outcome">
          <Outcome outcome={row.outcome} />
        </Fact>
        <Fact name="Success">
          <Success value={row.success} />
        </Fact>
        <Fact name="Reward">{fixed(row.reward, 4)}</Fact>
        <Fact name="Group">
          <a href={links.group(source, row.group_id)}>
            <Inline text={row.group_id} />
          </a>
          {row.member !== null && <span class="muted"> #{row.member}</span>}
        </Fact>
        <Fact name="Environment">
          <Inline text={row.environment} />
        </Fact>
        {row.task_type && (
          <Fact name="Task type">
            <Inline text={row.task_type} />
          </Fact>
        )}
        {row.split && <Fact name="Split">{row.split}</Fact>}
        {row.step > 0 && (
          <Fact name="Step">
            <a href={links.episodes(source, `step_from=${row.step}&step_to=${row.step}`)}>{row.step}</a>
          </Fact>
        )}
        <Fact name="Turns">{row.turns}</Fact>
        <Fact name="Tokens">
          {whole(row.tokens)} <span class="muted">({whole(row.sampled_tokens)} sampled)</span>
        </Fact>
        <Fact name="Weight versions">{versions}</Fact>
        {row.attempt > 0 && <Fact name="Attempt">{row.attempt + 1}</Fact>}
        <Fact name="Time">{seconds(row.seconds)}</Fact>
        {row.ended_at !== null && (
          <Fact name="Ended">
            <span title={dateTime(row.ended_at)}>{ago(row.ended_at)}</span>
          </Fact>
        )}
        {Object.entries(episode.reward_sources ?? {}).map(([name, value]) => (
          <Fact key={name} name={`Reward from ${name}`}>
            {num(value)}
          </Fact>
        ))}
        {Object.entries(episode.reward_components ?? {}).map(([name, value]) => (
          <Fact key={name} name={`Reward component ${name}`}>
            {num(value)}
          </Fact>
        ))}
        {Object.entries(episode.metrics ?? {}).map(([name, value]) =>
          name === "seconds" ? null : (
            <Fact key={name} name={words(name)}>
              {num(value)}
            </Fact>
          ),
        )}
      </Facts>
    </section>
  );
}

interface NotesProps {
  source: string;
  episode: Episode;
  turn: number | null;
  changed: () => void;
}

export function Notes({ source, episode, turn, changed }: NotesProps) {
  const [text, setText] = useState("");
  const [error, setError] = useState<ApiError | null>(null);
  const attempt = async (action: () => Promise<unknown>) => {
    try {
      await action();
      setError(null);
      changed();
      return true;
    } catch (caught) {
      setError(caught instanceof ApiError ? caught : new ApiError(String(caught), null, 0));
      return false;
    }
  };
  const add = async (event: Event) => {
    event.preventDefault();
    if (!text.trim()) return;
    const note = { episode: episode.row.id, turn, text: text.trim() };
    if (await attempt(() => post(api(source, "notes"), note))) setText("");
  };
  return (
    <section class="card notes" aria-label="Notes">
      <h2>Notes</h2>
      {error && <Failure error={error} />}
      <ul>
        {(episode.notes ?? []).map((note) => (
          <li key={note.id}>
            <TextBlock text={note.text} />
            <span class="muted">
              {note.turn !== null && (
                <a href={links.episode(source, episode.row.id, { turn: note.turn })}>{turnName(note.turn)}</a>
              )}{" "}
              <span title={dateTime(note.time)}>{ago(note.time)}</span>
            </span>
            <button
              type="button"
              class="link"
              aria-label="Delete this note"
              onClick={() => attempt(() => remove(api(source, "notes", note.id)))}
            >
              Delete
            </button>
          </li>
        ))}
      </ul>
      <form onSubmit={add}>
        <textarea
          rows={2}
          value={text}
          aria-label="New note"
          placeholder={turn === null ? "A note on this episode" : `A note on turn ${turn + 1}`}
          onInput={(event) => setText(event.currentTarget.value)}
        />
        <button type="submit" disabled={!text.trim()}>
          Add note
        </button>
      </form>
    </section>
  );
}
