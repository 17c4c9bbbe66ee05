// Prints the places on the first five pages that the site's search finds: node search.js SITE QUERY
const fs = require("fs"), path = require("path"), vm = require("vm");
const [site, query] = process.argv.slice(2);
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json")));
const folder = path.join(site, "assets/javascripts/workers");
const file = fs.readdirSync(folder).find(name => /^search.*\.js$/.test(name));
let handle, answered;
globalThis.self = globalThis;
globalThis.addEventListener = (_, listener) => { handle = listener; };
globalThis.postMessage = message => answered(message);
globalThis.Worker = class { postMessage(message) { handle({ data: message }); } };
vm.runInThisContext(fs.readFileSync(path.join(folder, file), "utf8"));
vm.runInThisContext(fs.readFileSync(path.join(site, "search.js"), "utf8"));
const ask = message => new Promise(done => { answered = done; new Worker().postMessage(message); });
(async () => {
  await ask({ type: 0, data: { config: index.config, docs: index.docs, options: { suggest: false } } });
  const { data } = await ask({ type: 2, data: query });
  console.log(JSON.stringify(data.items.slice(0, 5).map(pages => pages.map(one => one.location)).flat()));
})();
