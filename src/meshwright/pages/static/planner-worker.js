// Runs the planner, which is Python, in a worker of the page. Nothing is fetched but the files beside this one.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const report = (share, what) => postMessage({ progress: [share, what] });

async function start() {
  report(0.05, "loading Python, once");
  const [python, modules] = await Promise.all([
    loadPyodide({ indexURL: new URL("pyodide/", import.meta.url).href }),
    fetch(new URL("planner.zip", import.meta.url)).then((answer) => {
      if (!answer.ok) throw new Error(`planner.zip: ${answer.status}`);
      return answer.arrayBuffer();
    }),
  ]);
  report(0.5, "loading the planner, once");
  python.unpackArchive(modules, "zip", { extractDir: "/planner" });
  python.runPython("import sys; sys.path.insert(0, '/planner')");
  return python.pyimport("meshwright.planner.answer").respond;
}

const ready = start();
ready.catch(() => {}); // told with the first answer
onmessage = async ({ data }) => {
  try {
    const respond = await ready;
    postMessage({ answer: respond(data, report) });
  } catch (error) {
    postMessage({ failed: String(error.message ?? error) });
  }
};
