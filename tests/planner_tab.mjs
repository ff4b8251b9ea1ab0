// node planner_tab.mjs SITE: answers requests of the planner's page, a line of JSON each, as the worker of SITE does.
import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { createInterface } from "node:readline";

const site = resolve(process.argv[2]);
const { loadPyodide } = await import(`file://${site}/pyodide/pyodide.mjs`);
const python = await loadPyodide();
python.unpackArchive(new Uint8Array(readFileSync(`${site}/planner.zip`)).buffer, "zip", { extractDir: "/planner" });
python.runPython("import sys; sys.path.insert(0, '/planner')");
const { respond } = python.pyimport("meshwright.planner.answer");
for await (const line of createInterface({ input: process.stdin })) console.log(respond(line));
