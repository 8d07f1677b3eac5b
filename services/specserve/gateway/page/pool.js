// The pool as it is now, asked for once a second while the page is looked at.

import { getJson } from "./api.js";
import { brief, byId, describe, fillTable, make, percent } from "./dom.js";
import { drawPoolLengths } from "./lengths.js";

const PERIOD_MS = 1000;
const LATEST = 100;

/** Begin; `open` is told of a request that somebody wants to see. */
export function watchPool(open) {
  const look = async () => {
    if (!document.hidden) {
      try {
        await refresh(open);
      } catch (error) {
        describe(byId("pool-figures"), [["not known", error.message]]);
      }
    }
    setTimeout(look, PERIOD_MS);
  };
  look();
}

async function refresh(open) {
  const [pool, latest] = await Promise.all([
    // Where requests are not shown there is no such route.
    getJson("v1/specserve/pool"), getJson(`v1/specserve/requests?limit=${LATEST}`, [404]),
  ]);
  const requests = latest.requests ?? [];
  const rates = requests.map(rateOf);
  const mean = (drafted) => {
    const chosen = rates.filter((rate) => rate !== null && rate.drafted === drafted);
    return chosen.length ? `${(chosen.reduce((sum, rate) => sum + rate.value, 0) / chosen.length).toFixed(1)} (${chosen.length})` : "none yet";
  };
  describe(byId("pool-figures"), [
    ["speculation", pool.orchestrators.map((one) => one.speculation_mode).join(", ") || "unknown"],
    ["being decoded", pool.orchestrators.reduce((sum, one) => sum + one.num_running, 0)],
    ["waiting", pool.orchestrators.reduce((sum, one) => sum + one.num_waiting, 0)],
    ["draft tokens accepted", pool.num_draft_tokens ? percent(pool.num_accepted_draft_tokens / pool.num_draft_tokens) : "none yet"],
    ["tokens/s a request, drafted", mean(true)],
    ["tokens/s a request, not drafted", mean(false)],
  ]);
  fillTable(byId("replicas"), pool.replicas.map((replica) => [
    replica.role, make("span", "", brief(replica.replica_id) || "not known yet", { title: replica.replica_id }), replica.state, replica.num_sessions, replica.num_waiting,
    usage(replica.kv_cache_usage),
  ]));
  fillTable(byId("positions"), pool.accepted_per_position.map((count, i) => [
    i + 1, pool.num_drafts ? `${percent(count / pool.num_drafts)} of ${pool.num_drafts} rounds` : "-",
  ]));
  fillTable(byId("recent"), requests.slice(0, 12).map((request, i) => {
    const button = make("button", "", brief(request.request_id), {
      type: "button", title: request.request_id,
    });
    button.addEventListener("click", () => open(request.request_id));
    const drafted = request.num_draft_tokens;
    return [button, request.state, request.num_output_tokens,
      drafted ? `${request.num_accepted_draft_tokens}/${drafted}` : "-", rates[i]?.value.toFixed(1) ?? "-"];
  }));
  await drawPoolLengths(requests);
}

function rateOf(request) {
  const seconds = request.total_s - request.queue_s;
  if (request.state !== "finished" || seconds <= 0 || request.num_output_tokens < 2) return null;
  return { value: request.num_output_tokens / seconds, drafted: request.num_draft_tokens > 0 };
}

function usage(share) {
  const text = percent(share);
  return make("span", "", [make("meter", "", text, { min: 0, max: 1, value: share, "aria-label": `KV in use ${text}` }), ` ${text}`]);
}
