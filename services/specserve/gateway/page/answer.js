// One answer as it comes: its tokens, coloured by origin, each with what is known of it.

import { postStream } from "./api.js";
import { make, percent } from "./dom.js";

const TOP = 4;

export class Answer {
  /** `choose` is told of the token that is looked at. */
  constructor(title, choose) {
    this.tokens = [];
    this.requestId = null;
    this.record = null;
    this.title = title;
    this.rounds = null;
    this.firstRecorded = 0;
    this.choose = choose;
    this.text = make("div", "text", "", { role: "group", "aria-label": `${title}: tokens` });
    this.line = make("p", "figures-line", "waiting for the first token…");
    this.element = make("article", "answer", [make("h3", "", title), this.text, this.line]);
    this.decoder = new TextDecoder();
    this.round = { number: 1, position: 0 };
    this.text.addEventListener("keydown", (event) => this.#move(event));
    this.text.addEventListener("focusin", (event) => this.#look(event.target));
    this.text.addEventListener("mouseover", (event) => this.#look(event.target));
    this.text.addEventListener("click", (event) => event.target.focus?.());
  }

  /** Ask, and take in what comes until it is over. */
  async run(body, signal) {
    const began = performance.now();
    let first = null;
    const wanted = {
      ...body, stream: true, logprobs: true, top_logprobs: TOP, return_token_ids: true,
      speculation_metrics: "detailed",
    };
    for await (const chunk of postStream("v1/chat/completions", wanted, signal)) {
      this.requestId = chunk.id;
      if (chunk.metrics) this.record = chunk.metrics.speculative_decoding;
      for (const choice of chunk.choices) this.#take(choice);
      if (first === null && this.tokens.length) first = performance.now();
      this.#tell(began, first, performance.now());
    }
    this.#tell(began, first, performance.now(), true);
  }

  ids() {
    return this.tokens.map((token) => token.id);
  }

  #take(choice) {
    const ids = choice.token_ids ?? [];
    const origins = choice.token_origins ?? [];
    const scored = choice.logprobs?.content ?? [];
    ids.forEach((id, i) => {
      const origin = origins[i] ?? "plain";
      const token = {
        id, origin, index: this.tokens.length, round: this.round.number,
        position: this.round.position, scored: scored[i],
      };
      // A round ends with the token that is no accepted draft token.
      this.round = origin === "accepted"
        ? { number: token.round, position: token.position + 1 }
        : { number: token.round + 1, position: 0 };
      this.tokens.push(token);
      this.text.append(this.#element(token));
    });
  }

  #element(token) {
    const bytes = token.scored?.bytes;
    const text = bytes ? this.decoder.decode(new Uint8Array(bytes), { stream: true }) : token.scored?.token ?? "";
    const element = make("span", `token ${token.origin}`, text, {
      tabindex: token.index === 0 ? "0" : "-1", "data-index": token.index,
      "aria-label": `${JSON.stringify(text)}, ${token.origin}, round ${token.round}`, role: "button",
    });
    return element;
  }

  #look(element) {
    const index = element.dataset?.index;
    if (index === undefined) return;
    this.text.querySelector(".chosen")?.classList.remove("chosen");
    element.classList.add("chosen");
    this.choose(this, this.tokens[Number(index)]);
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const edge = { Home: 0, End: this.tokens.length - 1 }[event.key];
    const current = Number(document.activeElement?.dataset?.index ?? 0);
    const next = this.text.children[edge ?? current + (step ?? NaN)];
    if (!next) return;
    event.preventDefault();
    document.activeElement.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  #tell(began, first, now, over = false) {
    if (first === null) {
      if (over) this.line.textContent = "no token came";
      return;
    }
    const count = this.tokens.length;
    const seconds = (now - first) / 1e3;
    this.rate = count > 1 && seconds > 0 ? (count - 1) / seconds : 0;
    const accepted = this.tokens.filter((token) => token.origin === "accepted").length;
    const parts = [`${count} tokens`, `first after ${(first - began).toFixed(0)} ms`, `${this.rate.toFixed(1)} tokens/s`];
    if (this.record) {
      parts.push(`${this.record.num_accepted_draft_tokens} of ${this.record.num_draft_tokens} draft tokens accepted`);
      parts.push(`${this.record.mean_acceptance_length.toFixed(2)} tokens a drafted round`);
    } else if (count) parts.push(`${percent(accepted / count)} drafted`);
    this.line.textContent = parts.join(" · ");
  }
}

/** What is known of a token, as pairs for people. */
export function facts(answer, token) {
  const pairs = [
    ["token", `${JSON.stringify(token.scored?.token ?? "")} (id ${token.id})`],
    ["came from", token.origin],
    ["round", `${token.round}, place ${token.position + 1}`],
  ];
  if (token.scored) pairs.push(["probability under the target", Math.exp(token.scored.logprob).toFixed(4)]);
  const others = (token.scored?.top_logprobs ?? []).filter((other) => other.token !== token.scored.token);
  if (others.length) {
    pairs.push(["other likely tokens", others.map((other) =>
      `${JSON.stringify(other.token)} ${Math.exp(other.logprob).toFixed(3)}`).join(", ")]);
  }
  const round = roundOf(answer.rounds, token.index - answer.firstRecorded);
  if (round) {
    pairs.push(["K and why", `${round.num_speculative_tokens}, ${round.reason}`]);
    pairs.push(["proposer", round.proposer ?? "none"]);
    for (const call of round.calls.filter((one) => !one.is_background)) {
      pairs.push([call.service, `${call.replica_id} ${call.revision}`]);
    }
  }
  return pairs;
}

/** The remembered round that a token, counted from 0, came with; null where none is. */
function roundOf(rounds, index) {
  if (index < 0) return null;
  let seen = 0;
  for (const round of rounds ?? []) {
    seen += round.num_emitted_tokens;
    if (index < seen) return round;
  }
  return null;
}
