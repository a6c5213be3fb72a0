// Asks a server through OpenAI's client for node, and writes what came back as JSON.
// node openai_client.mjs FOLDER URL MODE, with the body of the request on stdin.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, url, mode] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${folder}/package.json`));
const OpenAI = require("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const body = JSON.parse(readFileSync(0, "utf-8"));

async function collect(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

const modes = {
  models: () => client.models.list().then((page) => page.data),
  completion: () => client.completions.create(body),
  completionStream: async () => collect(await client.completions.create({ ...body, stream: true })),
  chat: () => client.chat.completions.create(body),
  chatStream: async () => collect(await client.chat.completions.create({ ...body, stream: true })),
  error: () =>
    client.completions.create(body).then(
      () => null,
      (error) => ({ name: error.constructor.name, status: error.status, message: error.message }),
    ),
};

process.stdout.write(JSON.stringify(await modes[mode]()));
