// Builds the viewer into ../static, or into the folder given as an argument. The same sources give the same bytes.
import { createHash } from "node:crypto";
import { copyFile, mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { dirname, join, relative, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const output = process.argv[2] ?? join(here, "..", "static");

await rm(output, { recursive: true, force: true });
await mkdir(output, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.tsx" },
  outdir: output,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) await copyFile(join(here, "src", name), join(output, name));

const { dependencies } = JSON.parse(await readFile(join(here, "package.json"), "utf8"));
const licenses = [];
for (const name of [...Object.keys(dependencies), "@preact/signals-core"].sort()) {
  const folder = join(here, "node_modules", name);
  const { version } = JSON.parse(await readFile(join(folder, "package.json"), "utf8"));
  licenses.push(`${name} ${version}\n\n${await readFile(join(folder, "LICENSE"), "utf8")}`);
}
await writeFile(join(output, "licenses.txt"), licenses.join("\n\n"));

// A checksum of the sources, by which a test without npm notices that they were not built (tests/viewer/test_static.py).
const entries = await readdir(join(here, "src"), { recursive: true, withFileTypes: true });
const sources = entries.filter((one) => one.isFile()).map((one) => relative(here, join(one.parentPath, one.name)));
const checksum = createHash("sha256");
for (const name of [...sources, "build.mjs", "package-lock.json"].map((one) => one.split(sep).join("/")).sort()) {
  checksum
    .update(`${name}\0`)
    .update(await readFile(join(here, name)))
    .update("\0");
}
await writeFile(join(output, "sources.txt"), `${checksum.digest("hex")}\n`);
