// Runs Perfetto's trace processor, built for browsers, in node.
// usage: node trace_processor.js FOLDER < requests > replies
// Both are byte streams of perfetto.protos.TraceProcessorRpcStream.
'use strict';
const fs = require('fs');
const path = require('path');

process.chdir(process.argv[2]); // where it looks for its .wasm
const replies = [];
const port = {postMessage: (data) => replies.push(Buffer.from(data))};
globalThis.self = globalThis;
console.log = console.warn = (line) => process.stderr.write(`${line}\n`);
require(path.resolve('engine_bundle.js'));
globalThis.onmessage({data: {enginePort: port}});
const requests = fs.readFileSync(0);
setImmediate(() => {
  port.onmessage({data: new Uint8Array(requests)});
  fs.writeSync(1, Buffer.concat(replies));
});
