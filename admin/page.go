package admin

import (
	"bytes"
	"embed"
	"net/http"
	"path"

	"github.com/go-chi/chi/v5"
)

//go:embed page
var pageFiles embed.FS

var contentTypes = map[string]string{
	".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml",
}

const pagePolicy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"

// addPageRoutes adds the files of the live page. They contain no state of the proxy.
func (h *Handler) addPageRoutes(r chi.Router) {
	r.Use(h.requirePageAccess)
	files, _ := pageFiles.ReadDir("page") // embedded
	for _, file := range files {
		route := "/" + file.Name()
		if file.Name() == "index.html" {
			route = "/"
		}
		r.Get(route, h.servePageFile(file.Name()))
	}
}

// requirePageAccess serves clients on this machine, and others if there is a token, for which the page prompts.
func (h *Handler) requirePageAccess(next http.Handler) http.Handler {
	forOperators := h.requireOperator(next)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if isLocal(r) || *h.token.Load() != "" {
			next.ServeHTTP(w, r)
			return
		}
		forOperators.ServeHTTP(w, r)
	})
}

// isNavigationToPage reports whether a browser follows a link to the page. Links of other
// origins are harmless: the page is not shown in a frame.
func isNavigationToPage(r *http.Request) bool {
	return r.URL.Path == "/" && (r.Method == http.MethodGet || r.Method == http.MethodHead) &&
		r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
}

// servePageFile returns the handler of a file of the page.
func (h *Handler) servePageFile(file string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
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
}
