// SPDX-License-Identifier: Apache-2.0
// Sends requests through the Node SDKs of OpenAI and Anthropic; lines in and out as in `ask.py` beside this file.
//
//     node ask.mjs BASE_URL TIMEOUT_S
//
// Node's own fetch gives up a plain answer whose head is not there after 300 s, whatever the SDKs' limit is.

import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The packages are installed in another folder, which is the working directory.
const found = createRequire(pathToFileURL(`${process.cwd()}/package.json`));
const { Agent, fetch } = found("undici");
const OpenAI = found("openai").default;
const Anthropic = found("@anthropic-ai/sdk").default;

const [baseURL, timeoutS] = process.argv.slice(2);
const fetchOptions = { dispatcher: new Agent({ headersTimeout: 0, bodyTimeout: 0 }) };
const options = { apiKey: "no-key", maxRetries: 0, timeout: 1000 * timeoutS, fetch, fetchOptions };
const openai = new OpenAI({ baseURL: `${baseURL}/v1`, ...options });
const anthropic = new Anthropic({ baseURL, ...options });

async function ask(api, stream, { stream: _, ...body }) {
  if (api === "messages") {
    return stream ? anthropic.messages.stream(body).finalMessage() : anthropic.messages.create(body);
  }
  if (api === "responses") {
    return stream ? openai.responses.stream(body).finalResponse() : openai.responses.create(body);
  }
  return stream
    ? openai.chat.completions.stream(body).finalChatCompletion()
    : openai.chat.completions.create(body);
}

async function answer({ id, api, stream, body }) {
  try {
    return { id, status: 200, body: await ask(api, stream, body) };
  } catch (error) {
    const said = error.error ?? error.message ?? String(error);
    const failed = error instanceof OpenAI.APIError || error instanceof Anthropic.APIError;
    return { id, status: error.status ?? (failed ? 200 : 0), error: JSON.stringify(said) };
  }
}

createInterface({ input: process.stdin }).on("line", async (line) => {
  process.stdout.write(`${JSON.stringify(await answer(JSON.parse(line)))}\n`);
});
