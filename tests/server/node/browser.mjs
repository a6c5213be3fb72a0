// A headless browser with one page: reads calls as JSON lines, and answers each with a line.
// usage: node browser.mjs FOLDER, which `unpack.mjs` has filled
// A call is [name, arguments...], an answer {value} or {error}.
import {createRequire} from 'node:module';
import path from 'node:path';
import readline from 'node:readline';

const folder = path.resolve(process.argv[2]);
const {chromium} = createRequire(path.join(folder, 'package.json'))('playwright-core');
const unpacked = path.join(folder, 'chromium');
const browser = await chromium.launch({
  executablePath: path.join(unpacked, 'chromium'),
  chromiumSandbox: false, // tests may run as root
  env: {
    ...process.env,
    FONTCONFIG_PATH: path.join(unpacked, 'fonts'),
    LD_LIBRARY_PATH: path.join(unpacked, 'al2023', 'lib'),
  },
});
// A machine that is busy with other tests may take its time.
const LIMIT_MS = 120000;

let page;
let problems = [];

// Playwright's own `waitForFunction` evaluates a text again and again, which a page's policy may
// forbid; the debugger evaluates one once whatever the policy.
const untilTrue = (expression) => `new Promise((resolve, reject) => {
  const giveUp = () => reject(new Error('not so after ${LIMIT_MS} ms: ' + document.body.innerText));
  const limit = setTimeout(giveUp, ${LIMIT_MS});
  const look = () => {
    if (!(${expression})) return requestAnimationFrame(look);
    clearTimeout(limit);
    resolve();
  };
  look();
})`;

const calls = {
  // A new page, which shares nothing with the one before. Options: viewport, colorScheme, ...
  async open(url, options) {
    await page?.context().close();
    problems = [];
    const context = await browser.newContext(options);
    await context.clock.install();
    page = await context.newPage();
    page.setDefaultTimeout(LIMIT_MS);
    page.on('pageerror', (error) => problems.push(`${error}`));
    page.on('console', (message) => {
      if (['error', 'warning'].includes(message.type())) problems.push(message.text());
    });
    await page.goto(url);
  },
  click: (selector) => page.click(selector),
  fill: (selector, text) => page.fill(selector, text),
  select: (selector, value) => page.selectOption(selector, value),
  press: (key) => page.keyboard.press(key),
  text: (selector) => page.textContent(selector),
  evaluate: (expression) => page.evaluate(expression),
  waitFor: (expression) => page.evaluate(untilTrue(expression)),
  screenshot: (file, options) => page.screenshot({path: file, ...options}).then(() => null),
  skip: (ms) => page.clock.fastForward(ms),
  problems: () => problems.splice(0),
};

for await (const line of readline.createInterface({input: process.stdin})) {
  const [name, ...args] = JSON.parse(line);
  let answer;
  try {
    answer = {value: (await calls[name](...args)) ?? null};
  } catch (error) {
    answer = {error: `${error}`};
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
await browser.close();
