import { useEffect, useState } from "preact/hooks";
import { api, get, useGet } from "../base/api";
import { fixed, num, signed, whole } from "../base/format";
import { useKeys } from "../base/keys";
import { links, navigate, setQuery, url } from "../base/router";
import { Inline, visible } from "../base/text";
import type { Episode, Group, TokenColumns } from "../base/types";
import { Await, Empty, Fact, Facts, Loading, Outcome, SignedBar, SourceName, Success } from "../parts/common";
import { Shell } from "../parts/shell";
import { type Side, SideBySide } from "../parts/side_by_side";

const MOST_SIDES = 4;
const AROUND = 24;
type Member = Group["members"][number];

/** Load the documents of several episodes. */
function useEpisodes(source: string, ids: string[]): Record<string, Episode> {
  const [found, setFound] = useState<Record<string, Episode>>({});
  const key = ids.join("\n");
  useEffect(() => {
    const abort = new AbortController();
    for (const id of key.split("\n").filter(Boolean)) {
      get<Episode>(api(source, "episode", id), abort.signal).then(
        (episode) => setFound((old) => ({ ...old, [id]: episode })),
        () => {},
      );
    }
    return () => abort.abort();
  }, [source, key]);
  return found;
}

/** The tokens around the place where a member parts from the first one. */
function Parting({ source, member, position }: { source: string; member: Member; position: number }) {
  const sequence = member.parts_at?.sequence ?? 0;
  const from = Math.max(0, position - AROUND);
  const query = `sequence=${sequence}&from=${from}&to=${position + AROUND}`;
  const loaded = useGet<TokenColumns>(`${api(source, "episode", member.row.id, "tokens")}?${query}`);
  if (!loaded.data) return <span class="muted">…</span>;
  return (
    <code class="parting-text">
      …
      {loaded.data.text.map((text, i) => (
        <span key={i} class={from + i === position ? "t selected" : ""}>
          {visible(text.replaceAll("\n", "⏎"))}
        </span>
      ))}
      …
    </code>
  );
}

interface MembersProps {
  source: string;
  group: Group;
  chosen: string[];
  current: string | undefined;
  toggle: (id: string) => void;
}

function Members({ source, group, chosen, current, toggle }: MembersProps) {
  const scale = Math.max(...group.members.map((one) => Math.abs(one.advantage ?? 0)), 1e-9);
  const start = group.first_difference?.position ?? null;
  return (
    <table class="list members">
      <thead>
        <tr>
          <th scope="col">Shown</th>
          <th scope="col">Member</th>
          <th scope="col">Outcome</th>
          <th scope="col">Success</th>
          <th scope="col" class="number">
            Reward
          </th>
          <th scope="col" class="number">
            Advantage
          </th>
          <th scope="col">
            <span class="sr">Advantage as a bar</span>
          </th>
          <th scope="col" class="number">
            Turns
          </th>
          <th scope="col" class="number">
            Tokens
          </th>
          <th scope="col">Parts from the first member at</th>
        </tr>
      </thead>
      <tbody>
        {group.members.map((member, i) => {
          const at = member.parts_at?.position ?? (i === 0 ? start : null);
          return (
            <tr key={member.row.id} class={member.row.id === current ? "current" : ""}>
              <td>
                <input
                  type="checkbox"
                  checked={chosen.includes(member.row.id)}
                  onChange={() => toggle(member.row.id)}
                  aria-label={`Show member ${member.row.member ?? i}`}
                />
              </td>
              <th scope="row">
                <a href={links.episode(source, member.row.id)}>#{member.row.member ?? i}</a>
              </th>
              <td>
                <Outcome outcome={member.row.outcome} />
              </td>
              <td>
                <Success value={member.row.success} />
              </td>
              <td class="number">{fixed(member.row.reward, 4)}</td>
              <td class="number">{signed(member.advantage, 4)}</td>
              <td>
                <SignedBar value={member.advantage} scale={scale} />
              </td>
              <td class="number">{whole(member.row.turns)}</td>
              <td class="number">{whole(member.row.tokens)}</td>
              <td class="parts-at">
                {at === null ? (
                  <span class="muted">{i === 0 ? "" : "same tokens"}</span>
                ) : (
                  <>
                    <a href={links.episode(source, member.row.id, { token: at })}>token {at}</a>{" "}
                    <Parting source={source} member={member} position={at} />
                  </>
                )}
              </td>
            </tr>
          );
        })}
      </tbody>
    </table>
  );
}

/** The members that say most beside each other: the best and the worst one. */
function usualChoice(members: Member[]): string[] {
  const ordered = [...members].sort((a, b) => (b.row.reward ?? -1e9) - (a.row.reward ?? -1e9));
  const ids = [ordered[0], ordered.at(-1)].flatMap((one) => (one ? [one.row.id] : []));
  return [...new Set(ids)];
}

function GroupBody({ source, group }: { source: string; group: Group }) {
  const inAddress = url.value.searchParams.getAll("show");
  const chosen = inAddress.length ? inAddress : usualChoice(group.members);
  const [at, setAt] = useState(0);
  const episodes = useEpisodes(source, chosen);
  const current = group.members[at]?.row.id;
  const toggle = (id: string) =>
    setQuery({ show: chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id].slice(-MOST_SIDES) });
  const move = (by: number) => setAt((i) => Math.max(0, Math.min(group.members.length - 1, i + by)));
  useKeys([
    { keys: "j", help: "Next member", run: () => move(1) },
    { keys: "k", help: "Previous member", run: () => move(-1) },
    { keys: "x", help: "Show or hide the member below", run: () => current && toggle(current) },
    { keys: "Enter", help: "Open the member", run: () => current && navigate(links.episode(source, current)) },
  ]);
  const shown = group.members.filter((one) => chosen.includes(one.row.id));
  const sides: Side[] = shown.flatMap((member) => {
    const episode = episodes[member.row.id];
    if (!episode) return [];
    const partsAt = member.parts_at?.turn ?? group.first_difference?.turn ?? null;
    const head = (
      <>
        <a href={links.episode(source, member.row.id)}>#{member.row.member}</a> <Success value={member.row.success} />
        <span class="figures">
          <span>reward {fixed(member.row.reward)}</span>
          <span>advantage {signed(member.advantage)}</span>
        </span>
      </>
    );
    return [{ key: member.row.id, head, episode, partsAt }];
  });
  return (
    <>
      <Facts>
        <Fact name="Task">
          <Inline text={group.task} />
        </Fact>
        <Fact name="Members">{group.members.length}</Fact>
        <Fact name="Mean reward">{num(group.mean)}</Fact>
        <Fact name="Standard deviation">{num(group.std)}</Fact>
        <Fact name="First difference">
          {group.first_difference ? `token ${group.first_difference.position}` : "none: all sampled the same tokens"}
        </Fact>
      </Facts>
      <Members source={source} group={group} chosen={chosen} current={current} toggle={toggle} />
      {!chosen.length && <Empty title="No member is chosen." />}
      {sides.length < shown.length && <Loading what="the members" />}
      {sides.length > 0 && <SideBySide sides={sides} foldBefore={group.first_difference?.turn ?? null} />}
    </>
  );
}

export function GroupPage({ source, group }: { source: string; group: string }) {
  const loaded = useGet<Group>(api(source, "group", group));
  return (
    <Shell
      title={`Group ${group}`}
      source={source}
      crumbs={[
        { text: "Runs", to: links.runs() },
        { text: <SourceName source={source} />, to: links.run(source) },
        { text: "Episodes", to: links.episodes(source, `group=${encodeURIComponent(group)}`) },
        { text: <Inline text={`Group ${group}`} /> },
      ]}
    >
      <div class="page-head">
        <h1>
          Group <Inline text={group} />
        </h1>
      </div>
      <Await of={loaded} what="the group">
        {(data) =>
          data.members.length ? (
            <GroupBody source={source} group={data} />
          ) : (
            <Empty title="This group has no episodes." />
          )
        }
      </Await>
    </Shell>
  );
}
