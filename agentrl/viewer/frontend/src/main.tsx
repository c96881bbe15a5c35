import { render } from "preact";
import "uplot/dist/uPlot.min.css";
import "./style/theme.css";
import "./style/layout.css";
import "./style/episode.css";
import { links, path } from "./base/router";
import { ComparePage } from "./pages/compare";
import { EpisodePage } from "./pages/episode";
import { EpisodesPage } from "./pages/episodes";
import { GroupPage } from "./pages/group";
import { InFlightPage } from "./pages/in_flight";
import { RunPage } from "./pages/run";
import { RunsPage } from "./pages/runs";
import { Empty } from "./parts/common";
import { Shell } from "./parts/shell";

/** Decode a part of the path; one that is not valid stays as it is, and names nothing. */
function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function App() {
  const [area, source, page, id] = path.value.split("/").filter(Boolean).map(decoded);
  if (area === undefined) return <RunsPage />;
  if (area === "compare") return <ComparePage />;
  if (area === "r" && source !== undefined) {
    if (page === undefined) return <RunPage key={source} source={source} />;
    if (page === "episodes") return <EpisodesPage key={source} source={source} />;
    if (page === "in-flight") return <InFlightPage key={source} source={source} />;
    if (page === "episode" && id !== undefined) return <EpisodePage key={`${source} ${id}`} source={source} id={id} />;
    if (page === "group" && id !== undefined) return <GroupPage key={`${source} ${id}`} source={source} group={id} />;
  }
  return (
    <Shell title="Not found" crumbs={[{ text: "Runs", to: links.runs() }, { text: "Not found" }]}>
      <Empty title="There is no page at this address.">
        <a href={links.runs()}>All runs</a>
      </Empty>
    </Shell>
  );
}

const root = document.getElementById("app");
if (root) render(<App />, root);
