// Makes rooftrace/reporting/html/page.js and page.css of the sources here.
//
// The script begins with the digest of its sources, by which a test sees that it was made of them.

import { build } from "esbuild";
import { createHash } from "node:crypto";
import { readdir, readFile, writeFile } from "node:fs/promises";

const OUT = "../../rooftrace/reporting/html";

async function digest() {
  const names = (await readdir("src")).sort();
  const hash = createHash("sha256");
  for (const name of [...names.map((name) => `src/${name}`), "package-lock.json"]) {
    hash.update(name).update("\0").update(await readFile(name)).update("\0");
  }
  return hash.digest("hex");
}

async function made(entry) {
  const result = await build({
    entryPoints: [entry],
    bundle: true,
    minify: true,
    write: false,
    metafile: true,
    charset: "utf8",
    legalComments: "none",
    target: ["es2022", "chrome123", "firefox120", "safari17.5"],
    jsx: "automatic",
    jsxImportSource: "preact",
  });
  return { text: result.outputFiles[0].text, inputs: Object.keys(result.metafile.inputs) };
}

/** The packages that a bundle holds parts of, each with its licence. */
async function licences(inputs) {
  const names = inputs.map((path) => path.match(/node_modules\/((?:@[^/]+\/)?[^/]+)\//)?.[1]);
  const packages = [...new Set(names.filter(Boolean))].sort();
  return Promise.all(
    packages.map(async (name) => {
      const { license, version } = JSON.parse(await readFile(`node_modules/${name}/package.json`));
      const files = await readdir(`node_modules/${name}`);
      const file = files.find((file) => /^licen[cs]e/i.test(file));
      const text = (await readFile(`node_modules/${name}/${file}`, "utf8")).trim();
      return { name, version, license, text };
    }),
  );
}

const script = await made("src/page.tsx");
const styles = await made("src/page.css");
const parts = await licences(script.inputs);
const holders = new Set(
  parts.map(({ name, license, text }) => {
    const holder = text.match(/copyright.*/i)?.[0] ?? name;
    return `${name.startsWith("d3-") ? "d3" : name} (${license}): ${holder}`;
  }),
);
const head = `/*! rooftrace page (MIT), of sources ${await digest()}\nWith parts of ${[...holders].join("\n")}\nTheir licences stand in rooftrace/reporting/html/NOTICE. */\n`;
await writeFile(`${OUT}/page.js`, head + script.text);
await writeFile(`${OUT}/page.css`, styles.text);
await writeFile(
  `${OUT}/NOTICE`,
  "page.js holds parts of these packages.\n\n" +
    parts.map((p) => `${p.name} ${p.version} (${p.license})\n\n${p.text}\n`).join("\n---\n\n"),
);
console.log(`page.js: ${(script.text.length / 1024).toFixed(0)} KiB, page.css: ${(styles.text.length / 1024).toFixed(0)} KiB`);
