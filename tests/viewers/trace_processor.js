// Runs Perfetto's trace processor (wasm) in node: requests come on stdin and replies leave on stdout, each with its
// length in 4 bytes before it. The argument is the folder of Perfetto's user interface.
const fs = require("fs"), path = require("path"), vm = require("vm");
const folder = process.argv[2];

class FileRequest {
  open(_, url) { this.url = url; }
  setRequestHeader() {}
  send() {
    const bytes = fs.readFileSync(path.join(folder, path.basename(this.url)));
    this.response = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
    this.status = 200;
    if (this.onload) this.onload();
  }
}

const quiet = { log() {}, info() {}, debug() {}, warn() {}, error: (...words) => process.stderr.write(words.join(" ") + "\n") };
const scope = {
  console: quiet, TypeError, Error, Uint8Array, ArrayBuffer, WebAssembly, TextDecoder, TextEncoder, URL, performance,
  setTimeout, clearTimeout, setInterval, clearInterval, queueMicrotask, Promise, XMLHttpRequest: FileRequest,
  WorkerGlobalScope: function () {}, location: { href: `file://${folder}/engine_bundle.js`, pathname: "/engine_bundle.js" },
  addEventListener() {}, postMessage() {}, importScripts() {},
  fetch: async (url) => {
    const bytes = fs.readFileSync(path.join(folder, path.basename(url)));
    return new Response(bytes, { headers: { "Content-Type": "application/wasm" } });
  },
};
scope.self = scope;
scope.globalThis = scope;
const context = vm.createContext(scope);
vm.runInContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), context);

const port = {
  onmessage: null,
  postMessage(reply) {
    const bytes = Buffer.from(reply.buffer || reply, reply.byteOffset || 0, reply.byteLength);
    const length = Buffer.alloc(4);
    length.writeUInt32LE(bytes.length);
    process.stdout.write(Buffer.concat([length, bytes]));
  },
};
scope.onmessage({ data: port });

let waiting = Buffer.alloc(0);
process.stdin.on("data", (bytes) => {
  waiting = Buffer.concat([waiting, bytes]);
  while (waiting.length >= 4 && waiting.length >= 4 + waiting.readUInt32LE(0)) {
    const end = 4 + waiting.readUInt32LE(0);
    port.onmessage({ data: new Uint8Array(waiting.subarray(4, end)) });
    waiting = waiting.subarray(end);
  }
});
process.stdin.on("end", () => process.exit(0));
