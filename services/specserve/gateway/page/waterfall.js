// A request's rounds on one time axis: what each second of it went into.

import { byId, drawColumns, make, milliseconds, percent } from "./dom.js";
import { reasons } from "./lengths.js";

/** Stages in the order of a round: field of the gateway's answer, class, words. */
const STAGES = [
  ["draft_queue_s", "queue", "queue"],
  ["draft_forward_s", "draft", "draft"],
  ["draft_transport_s", "transport", "transport"],
  ["lost_s", "lost", "lost: late, failed or moved"],
  ["verify_queue_s", "queue", "queue"],
  ["verify_forward_s", "verify", "verify"],
  ["verify_transport_s", "transport", "transport"],
  ["commit_s", "commit", "decide, accept, commit"],
];
const MAX_ROUNDS = 400;

byId("stages").replaceChildren(...legend());

function legend() {
  const seen = new Map(STAGES.map(([, name, words]) => [name, words]));
  const items = [...seen].map(([name, words]) =>
    make("li", "", [make("span", `swatch ${name}`), words]));
  return [...items, make("li", "", "thin: drafting beside it that nobody waited for")];
}

/** Draw one request as the gateway remembers it. */
export function drawWaterfall(request) {
  const rounds = request.rounds.slice(0, MAX_ROUNDS);
  const longest = Math.max(...rounds.map((round) => round.wall_s), 1e-9);
  byId("waterfall").replaceChildren(...rounds.map((round, i) => row(round, i, longest)));
  const total = rounds.reduce((sum, round) => sum + round.wall_s, 0) || 1;
  const shares = new Map();
  for (const [field, , words] of STAGES) {
    const seconds = rounds.reduce((sum, round) => sum + round.stages[field], 0);
    shares.set(words, (shares.get(words) ?? 0) + seconds);
  }
  const said = [...shares].filter(([, seconds]) => seconds > 0)
    .sort((a, b) => b[1] - a[1]).map(([words, seconds]) => `${words} ${percent(seconds / total)}`);
  byId("waterfall-note").textContent =
    `${request.request_id}: ${request.num_rounds} rounds in ${milliseconds(request.total_s)}, ` +
    `${milliseconds(request.queue_s)} of it before the first; ${said.join(", ")}` +
    (request.overlap_s > 0 ? `; drafted beside it, waited for by nobody: ${milliseconds(request.overlap_s)}` : "");
  drawLengths(rounds);
}

function row(round, i, longest) {
  const lane = make("div", "lane", "", { role: "cell" });
  let left = 0;
  for (const [field, name, words] of STAGES) {
    const seconds = round.stages[field];
    if (seconds <= 0) continue;
    lane.append(bar(name, left, seconds, longest, `${words}: ${milliseconds(seconds)}`));
    left += seconds;
  }
  if (round.overlap_s > 0) {
    lane.append(bar("draft beside", 0, Math.min(round.overlap_s, longest), longest, `drafted beside: ${milliseconds(round.overlap_s)}`));
  }
  const said = `K ${round.num_speculative_tokens} · ${round.num_accepted_tokens}/${round.num_draft_tokens} · +${round.num_emitted_tokens}`;
  return make("div", "round", [
    make("span", "", String(i + 1), { role: "cell" }),
    make("span", "", said, { role: "cell", title: `${round.reason}; ${round.proposer ?? "no proposer"}` }),
    lane,
  ], { role: "row", "aria-label": `round ${i + 1}: ${said}, ${milliseconds(round.wall_s)}` });
}

function bar(name, from, seconds, longest, title) {
  const element = make("div", `bar ${name}`, "", { title });
  element.style.left = `${(100 * from) / longest}%`;
  element.style.width = `${(100 * seconds) / longest}%`;
  return element;
}

function drawLengths(rounds) {
  drawColumns(byId("k-chart"), rounds.map((round, i) => ({
    value: round.num_speculative_tokens,
    title: `round ${i + 1}: K ${round.num_speculative_tokens}, ${round.reason}`,
  })));
  byId("k-note").textContent = reasons(rounds);
}
