// Requests to the gateway that served the page, with the user's API key.

const KEY = "baton.key"; // in the session storage, which ends with the tab

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

/** An error response: its status, and the server's own message. */
export class Refused extends Error {
  constructor(status, message, requestId) {
    super(message);
    this.status = status;
    this.requestId = requestId;
  }
}

/** Send a request to a path below the page's. Throws `Refused`, or `TypeError` if nobody answers. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey.get()) headers.authorization = `Bearer ${apiKey.get()}`;
  const response = await fetch(new URL(path, document.baseURI), { ...options, headers });
  if (response.ok) return response;
  throw new Refused(response.status, await errorText(response), response.headers.get("x-request-id"));
}

async function errorText(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 300) || response.statusText || `status ${response.status}`; // no JSON: a balancer's answer
  }
}

/** Yield the data of a stream's server-sent events, without `[DONE]`. Throws `Error` if the stream broke off. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("The connection ended before the answer did.");
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // a stream that has ended already cannot be cancelled
  }
}
