// Unpacks the browser of @sparticuz/chromium, with its libraries and fonts.
// usage: node unpack.mjs FOLDER, which holds node_modules and gets a folder chromium
import fs from 'node:fs';
import {createRequire} from 'node:module';
import path from 'node:path';
import {pathToFileURL} from 'node:url';

const folder = path.resolve(process.argv[2]);
const target = path.join(folder, 'chromium');
fs.mkdirSync(target);
process.env.TMPDIR = target; // where the package unpacks to
const file = createRequire(path.join(folder, 'package.json')).resolve('@sparticuz/chromium');
const {default: chromium, inflate} = await import(pathToFileURL(file));
chromium.setGraphicsMode = false;
await chromium.executablePath();
// It holds what a machine without a desktop lacks, and is unpacked by itself on some clouds only.
await inflate(path.join(path.dirname(file), '..', 'bin', 'al2023.tar.br'));
// The package's own file expects the fonts in /tmp.
fs.writeFileSync(
  path.join(target, 'fonts', 'fonts.conf'),
  '<?xml version="1.0"?><fontconfig><dir prefix="relative">fonts</dir></fontconfig>\n',
);
