import { useEffect, useState } from "preact/hooks";
import { api, useEvents, useGet } from "../base/api";
import { ago, dateTime, seconds, words } from "../base/format";
import { links } from "../base/router";
import { Inline, TextBlock } from "../base/text";
import type { InFlight, InFlightEpisode, LiveTraffic } from "../base/types";
import { Await, Empty, SourceName } from "../parts/common";
import { Shell } from "../parts/shell";

function Card({ episode, now }: { episode: InFlightEpisode; now: number }) {
  return (
    <article class="card flight" aria-label={episode.id}>
      <header>
        <h2>
          <Inline text={episode.task} />
        </h2>
        <span class="badge">{words(episode.state)}</span>
        {episode.since !== null && <span class="figure">{seconds(Math.max(0, now - episode.since))}</span>}
      </header>
      <p class="muted">
        <Inline text={`${episode.environment} · ${episode.id}`} />
      </p>
      {episode.turns.length ? (
        <ol>
          {episode.turns.map((turn, i) => (
            <li key={i} class={turn.role}>
              <span class="label">{turn.role}</span>
              <TextBlock text={turn.text} />
            </li>
          ))}
        </ol>
      ) : (
        <p class="muted">No turn yet.</p>
      )}
    </article>
  );
}

function Traffic({ live }: { live: LiveTraffic }) {
  const counts = Object.entries(live.counts).filter(([, count]) => count > 0);
  return (
    <p>
      Live traffic at <code>{live.url}</code>: {live.open} open sessions, {live.waiting} of {live.batch} rewarded for a
      step{counts.length > 0 && <> · since its start: {counts.map(([name, n]) => `${n} ${words(name)}`).join(", ")}</>}
    </p>
  );
}

export function InFlightPage({ source }: { source: string }) {
  const loaded = useGet<InFlight>(api(source, "in-flight"));
  const [clock, setClock] = useState(Date.now() / 1000);
  const isRunning = loaded.data?.state === "running";
  useEvents(source, ["status", "sources"], loaded.reload, { beat: isRunning ? 5000 : null });
  useEffect(() => {
    if (!isRunning) return;
    const timer = setInterval(() => setClock(Date.now() / 1000), 1000);
    return () => clearInterval(timer);
  }, [isRunning]);
  return (
    <Shell
      title="In flight"
      source={source}
      crumbs={[
        { text: "Runs", to: links.runs() },
        { text: <SourceName source={source} />, to: links.run(source) },
        { text: "In flight" },
      ]}
    >
      <Await of={loaded} what="the episodes in flight">
        {(data) => {
          const states = Map.groupBy(data.in_flight, (one) => one.state);
          const now = isRunning ? clock : (data.time ?? clock);
          return (
            <>
              <div class="page-head">
                <h1>{isRunning ? "Episodes in flight" : "Episodes that were in flight"}</h1>
                <span class="count">{data.in_flight.length}</span>
                {[...states].map(([state, all]) => (
                  <span key={state} class="badge">
                    {words(state)} {all.length}
                  </span>
                ))}
                <span class="muted" title={dateTime(data.time)}>
                  as of {ago(data.time)}
                </span>
              </div>
              {data.state === "crashed" && (
                <p class="error">✕ The run ended without finishing. These episodes were running when it did.</p>
              )}
              {data.live && <Traffic live={data.live} />}
              {data.in_flight.length ? (
                <div class="flights">
                  {data.in_flight.map((episode) => (
                    <Card key={episode.id} episode={episode} now={now} />
                  ))}
                </div>
              ) : (
                <Empty title={isRunning ? "No episode is running at this moment." : "No episode was running."} />
              )}
            </>
          );
        }}
      </Await>
    </Shell>
  );
}
