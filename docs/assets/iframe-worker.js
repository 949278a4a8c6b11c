// Browsers start no workers for pages that are opened from a folder. The search then runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      const load = (script) =>
        new Promise((loaded, failed) => {
          const element = inside.document.createElement("script")
          Object.assign(element, { src: script, onload: loaded, onerror: failed })
          inside.document.head.append(element)
        })
      inside.postMessage = (data) => this.receive(data)
      inside.importScripts = (...scripts) =>
        scripts.reduce((before, script) => before.then(() => load(new URL(script, url).href)), Promise.resolve())
      this.inside = inside
      this.started = load(url)
    }

    receive(data) {
      const message = new MessageEvent("message", { data })
      this.onmessage?.(message)
      this.dispatchEvent(message)
    }

    postMessage(data) {
      this.started.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })))
    }

    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
