// Calls to the gateway that served this page: JSON, and streams of server-sent events.

const keyField = document.getElementById("api-key");
const KEY = "specserve-api-key";

keyField.value = sessionStorage.getItem(KEY) ?? "";
keyField.addEventListener("change", () => sessionStorage.setItem(KEY, keyField.value.trim()));

function headers() {
  const key = keyField.value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function refused(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return new Error(`${response.status}: ${error.message}`);
  } catch {
    return new Error(`${response.status}: ${text.slice(0, 200)}`);
  }
}

/** Ask for JSON; an answer of 503 to /ready is one, too. */
export async function getJson(path, accepted = []) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok && !accepted.includes(response.status)) throw await refused(response);
  return response.json();
}

/** Send a body and yield each event of the stream, parsed. */
export async function* postStream(path, body, signal) {
  const response = await fetch(path, {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw await refused(response);
  const decoder = new TextDecoder();
  let rest = "";
  for await (const bytes of parts(response.body.getReader())) {
    rest += decoder.decode(bytes, { stream: true });
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (data === undefined || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

async function* parts(reader) {
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
