// The page: what is asked, what comes, and what is known of it.

import { getJson } from "./api.js";
import { Answer, facts } from "./answer.js";
import { byId, describe } from "./dom.js";
import { watchPool } from "./pool.js";
import { drawWaterfall } from "./waterfall.js";

const RECORD_TRIES = 10;
const RECORD_WAIT_MS = 150;
let running = null;

function body(k) {
  const read = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  return {
    messages: [{ role: "user", content: byId("prompt").value }],
    num_speculative_tokens: k, temperature: read("temperature"), seed: read("seed"),
    max_tokens: read("max-tokens"),
  };
}

/** Run answers one after the other, so that none takes time from another. */
async function ask(plans) {
  running?.abort();
  const mine = (running = new AbortController());
  byId("problem").hidden = true;
  byId("equality").hidden = true;
  byId("stop-button").disabled = false;
  describe(byId("token"), []);
  const answers = plans.map(([title]) => new Answer(title, (answer, token) =>
    describe(byId("token"), facts(answer, token))));
  byId("answers").replaceChildren(...answers.map((answer) => answer.element));
  try {
    for (const [i, [, k]] of plans.entries()) {
      await answers[i].run(body(k), mine.signal);
      await showRounds(answers[i]);
    }
    if (plans.length === 2) tellEquality(...answers);
  } catch (error) {
    if (error.name !== "AbortError") complain(error);
  } finally {
    if (running === mine) byId("stop-button").disabled = true;
  }
}

/** The record is there once the request has ended, a moment after its last token. */
async function showRounds(answer) {
  for (let i = 0; i < RECORD_TRIES; i += 1) {
    const request = await recorded(answer.requestId);
    if (request && request.state !== "running") {
      answer.rounds = request.rounds;
      // After a failover the record is of what came since.
      answer.firstRecorded = request.carried_over_length ?? 0;
      drawWaterfall(request);
      return;
    }
    await new Promise((resolve) => setTimeout(resolve, RECORD_WAIT_MS));
  }
}

async function recorded(id) {
  const { requests } = await getJson(`v1/specserve/requests/${encodeURIComponent(id)}`, [404]);
  return requests?.[requests.length - 1];
}

function tellEquality(on, off) {
  const [a, b] = [on.ids(), off.ids()];
  const at = a.findIndex((id, i) => id !== b[i]);
  const same = a.length === b.length && at < 0;
  const seeded = byId("seed").value !== "" || Number(byId("temperature").value) === 0;
  byId("equality").hidden = false;
  byId("equality").textContent = same
    ? `Equal, token for token: ${a.length} tokens; ${(on.rate / off.rate).toFixed(2)} times the speed.`
    : `Different from token ${1 + (at < 0 ? Math.min(a.length, b.length) : at)} on` +
      (seeded ? ": this must not be." : ": without a seed two answers are two draws.");
}

function complain(error) {
  byId("problem").hidden = false;
  byId("problem").textContent = error.message;
}

async function tellServed() {
  try {
    const ready = await getJson("ready", [503]);
    const lossless = ready.lossless === false ? " · NOT lossless" : "";
    byId("served").textContent = ready.ready
      ? `${ready.target}, ${ready.speculation_enabled ? `drafted by ${ready.draft ?? "its own text"}, K ${ready.num_speculative_tokens}` : "target alone"}${lossless}`
      : `not ready: ${ready.reason}`;
    byId("k").max = String(ready.num_speculative_tokens ?? 0);
  } catch (error) {
    byId("served").textContent = error.message;
  }
  setTimeout(tellServed, 5000);
}

function useTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
  byId("theme").setAttribute("aria-pressed", String(theme === "dark"));
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const k = byId("k").value === "" ? undefined : Number(byId("k").value);
  ask([["Answer", k]]);
});
byId("compare-button").addEventListener("click", () => {
  if (!byId("ask").reportValidity()) return;
  const k = Number(byId("k").value) || undefined;
  ask([["Speculation on", k], ["Speculation off", 0]]);
});
byId("stop-button").addEventListener("click", () => running?.abort());
byId("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("specserve-theme", theme);
  useTheme(theme);
});
useTheme(localStorage.getItem("specserve-theme") ??
  (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
tellServed();
watchPool(async (id) => {
  try {
    const request = await recorded(id);
    if (request) drawWaterfall(request);
  } catch (error) {
    complain(error);
  }
});
