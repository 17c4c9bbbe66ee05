// Prepares what is typed into the search field for lunr: "--outside" would exclude a word, and "partition C" would match
// every word that begins with c.
const send = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  if (typeof message?.data === "string") {
    message.data = message.data.replace(/(^|\s)-+(?=\w)/g, "$1").replace(/(^|\s)(?=\w(\s|$))/g, "$1+");
  }
  return send.call(this, message, ...rest);
};
