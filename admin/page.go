package admin

import (
	"bytes"
	"embed"
	"net/http"
	"path"
)

//go:embed page
var pageFiles embed.FS

var contentTypes = map[string]string{
	".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml",
}

const pagePolicy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"

// pageFile returns the requested file of the live page, or "". The files contain no state of the proxy.
func pageFile(r *http.Request) string {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		return ""
	}
	switch r.URL.Path {
	case "/":
		return "index.html"
	case "/style.css", "/page.js", "/history.js", "/finished.js", "/usage.js", "/icon.svg":
		return r.URL.Path[1:]
	}
	return ""
}

// isNavigationToPage reports whether a browser follows a link to the page. Links of other
// origins are harmless: the page is not shown in a frame.
func isNavigationToPage(r *http.Request) bool {
	return pageFile(r) == "index.html" && r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
}

func (h *Handler) servePageFile(w http.ResponseWriter, file string) {
	body, err := pageFiles.ReadFile("page/" + file)
	if err != nil {
		writeError(w, http.StatusInternalServerError, err.Error())
		return
	}
	if *h.token.Load() != "" { // the page prompts for the token before its first request
		body = bytes.Replace(body, []byte(`data-token="none"`), []byte(`data-token="wanted"`), 1)
	}
	set := w.Header().Set
	set("Content-Type", contentTypes[path.Ext(file)])
	set("Content-Security-Policy", pagePolicy)
	set("Cross-Origin-Opener-Policy", "same-origin")
	set("Referrer-Policy", "no-referrer")
	w.Write(body)
}
