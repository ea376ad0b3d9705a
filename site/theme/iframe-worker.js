// A page opened from disk may not start a worker. The search then runs in a hidden frame, with the
// same messages. The theme would load such a script from the network; this one comes along.
"use strict"

if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.early = [] // messages sent before the frame is there
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.title = "search"
      document.body.appendChild(frame)
      const inside = frame.contentWindow
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...urls) =>
        urls.reduce((done, each) => done.then(() => this.run(inside, each)), Promise.resolve())
      this.run(inside, url).then(() => {
        this.inside = inside
        for (const data of this.early) this.postMessage(data)
      })
    }

    run(inside, url) {
      return new Promise((resolve, reject) => {
        const script = inside.document.createElement("script")
        script.src = new URL(url, location).href
        script.onload = resolve
        script.onerror = reject
        inside.document.body.appendChild(script)
      })
    }

    postMessage(data) {
      if (!this.inside) this.early.push(data)
      else this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }))
    }
  }
  window.Worker = window.IFrameWorker
}
