// Browsers refuse a worker to a page that is opened from the disk. There, the search's worker runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = `<script src="${url}"></script>`;
      this.started = new Promise((resolve) => {
        this.frame.onload = () => {
          const inside = this.frame.contentWindow;
          inside.postMessage = (data) => setTimeout(() => this.onmessage?.({ data }));
          resolve(inside);
        };
      });
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.started.then((inside) => inside.onmessage({ data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
