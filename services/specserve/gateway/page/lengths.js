// K over time, of all requests together: from the rounds of the latest ones, read once each.

import { getJson } from "./api.js";
import { byId, drawColumns } from "./dom.js";

const MAX_READS = 12;
const MAX_KEPT = 100;
const NUM_COLUMNS = 60;
const COLUMN_S = 2;
/** Rounds by request, [{at, k, reason}], the latest read last. */
const kept = new Map();

/** Take in what `latest`, the newest first, has that is new, and draw the last two minutes of it. */
export async function drawPoolLengths(latest) {
  const wanted = latest.filter((one) => (kept.get(one.request_id)?.length ?? 0) < one.num_rounds)
    .slice(0, MAX_READS);
  await Promise.all(wanted.map(read));
  for (const id of [...kept.keys()].slice(0, Math.max(0, kept.size - MAX_KEPT))) kept.delete(id);
  draw([...kept.values()].flat());
}

async function read({ request_id: id, num_rounds: count }) {
  const { requests } = await getJson(`v1/specserve/requests/${encodeURIComponent(id)}`, [404]);
  const found = (requests ?? []).flatMap((one) => one.rounds.map((round) =>
    ({ at: one.arrived_unix_s + round.began_s, k: round.num_speculative_tokens, reason: round.reason })));
  kept.delete(id);
  // Rounds that were not kept for want of room are not asked for again.
  while (found.length < count) found.push({ at: 0, k: 0, reason: "" });
  kept.set(id, found);
}

function draw(rounds) {
  // By the rounds' own clock: the reader's may be another.
  const end = rounds.reduce((latest, round) => Math.max(latest, round.at), 0);
  const columns = Array.from({ length: NUM_COLUMNS }, () => []);
  for (const round of rounds) {
    const back = Math.floor((end - round.at) / COLUMN_S);
    if (back < NUM_COLUMNS) columns[NUM_COLUMNS - 1 - back].push(round);
  }
  drawColumns(byId("pool-k-chart"), columns.map((found, i) => {
    const value = found.length ? found.reduce((sum, round) => sum + round.k, 0) / found.length : 0;
    const before = (NUM_COLUMNS - 1 - i) * COLUMN_S;
    return { value, title: `${before} s before the last round: K ${value.toFixed(1)} of ${found.length} rounds, ${reasons(found)}` };
  }));
  byId("pool-k-note").textContent = rounds.length
    ? `Mean K in steps of ${COLUMN_S} s up to ${new Date(1e3 * end).toLocaleTimeString()}. ${reasons(columns.flat())}`
    : "No request is remembered yet.";
}

/** Say how many rounds had which reason, the most frequent first. */
export function reasons(rounds) {
  const counts = new Map();
  for (const { reason } of rounds) counts.set(reason, (counts.get(reason) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]).map(([reason, count]) => `${reason}: ${count}`).join(", ");
}
