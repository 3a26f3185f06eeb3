//go:build browser

package e2e

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
)

// TestPageOfOtherOriginChats has pages of two origins send a streamed chat with a key, of which one origin
// is listed.
func TestPageOfOtherOriginChats(t *testing.T) {
	const secret = "the-key-of-a-web-page"
	serve := func() string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			io.WriteString(w, "<!doctype html><link rel=icon href=data:,><title>chat</title>")
		}))
		t.Cleanup(s.Close)
		return s.URL
	}
	listed, other := serve(), serve()
	p := startPage(t, "cors: {origins: "+listed+"}\nkeys_file: "+writeFile(t, "page "+secret+"\n"))
	chat := func(page *tab, key string) string {
		evaluate[bool](page, `window.result = "", (async () => {
			const response = await fetch("`+p.url+`/v1/chat/completions", {
				method: "POST",
				headers: {"Authorization": "Bearer `+key+`", "Content-Type": "application/json"},
				body: JSON.stringify({model: "sim", stream: true, max_tokens: 4, ignore_eos: true, messages: [{role: "user", content: "hello"}]}),
			});
			let text = "";
			for await (const part of response.body.pipeThrough(new TextDecoderStream())) text += part;
			window.result = response.status + " " + (response.headers.get("X-Request-Id") !== null) + " " + text;
		})().catch(error => window.result = String(error)), true`)
		page.until(`window.result !== ""`)
		return evaluate[string](page, "window.result")
	}
	page := openPage(t, listed)
	if got := chat(page, secret); !strings.HasPrefix(got, "200 true data: {") || !strings.HasSuffix(got, "data: [DONE]\n\n") {
		t.Errorf("listed origin: %.300s", got)
	}
	if got := chat(page, "another"); !strings.HasPrefix(got, "401 true {") {
		t.Errorf("listed origin, unknown key: %.300s", got)
	}
	blocked, close := openTab(t) // its console says so
	defer close()
	blocked.do(chromedp.Navigate(other))
	if got := chat(blocked, secret); !strings.HasPrefix(got, "TypeError: ") {
		t.Errorf("other origin: %.300s", got)
	}
}
