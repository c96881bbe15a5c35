/** The prompt that the model read at a turn, and the stored record. */
import { api, useGet } from "../base/api";
import { whole } from "../base/format";
import { setQuery } from "../base/router";
import { TextBlock } from "../base/text";
import { Await, Copy } from "./common";
import { turnName } from "./turn";

export function Prompt(props: { source: string; id: string; turns: number[]; turn: number }) {
  const { source, id, turns, turn } = props;
  const loaded = useGet<{ text: string | null; ids: number[] }>(`${api(source, "episode", id, "prompt")}?turn=${turn}`);
  return (
    <section class="card">
      <div class="card-head">
        <label class="inline-field">
          What the model read before
          <select value={String(turn)} onChange={(e) => setQuery({ turn: e.currentTarget.value })}>
            {turns.map((one) => (
              <option key={one} value={String(one)}>
                {turnName(one)}
              </option>
            ))}
          </select>
        </label>
        {loaded.data && (
          <>
            <span class="muted">{whole(loaded.data.ids.length)} tokens</span>
            {loaded.data.text !== null && <Copy text={loaded.data.text} label="Copy text" />}
            <Copy text={JSON.stringify(loaded.data.ids)} label="Copy ids" />
          </>
        )}
      </div>
      <Await of={loaded} what="the prompt">
        {(prompt) => <TextBlock text={prompt.text ?? prompt.ids.join(" ")} class="mono" />}
      </Await>
    </section>
  );
}

export function RawRecord({ source, id }: { source: string; id: string }) {
  const loaded = useGet<unknown>(api(source, "episode", id, "raw"));
  return (
    <section class="card">
      <Await of={loaded} what="the record">
        {(record) => {
          const text = JSON.stringify(record, null, 2);
          return (
            <>
              <div class="card-head">
                <span class="muted">{whole(text.length)} characters</span>
                <Copy text={text} label="Copy JSON" title="The stored record" />
              </div>
              <TextBlock text={text} class="mono" />
            </>
          );
        }}
      </Await>
    </section>
  );
}
