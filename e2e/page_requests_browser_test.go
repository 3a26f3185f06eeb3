//go:build browser

package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"

	"warmroute/lab/sim"
)

func TestPageFindsFinishedRequests(t *testing.T) {
	proxy := startPage(t, "")
	send := func(id, model string) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, proxy.url+"/v1/chat/completions",
			strings.NewReader(`{"model":"`+model+`","max_tokens":3,"messages":[{"role":"user","content":"not to be shown"}]}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Request-Id", id)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	send("the-first", "sim")
	send("the-second", "no-such-model")
	page := openPage(t, proxy.admin)
	const row = "#finished tbody tr"
	page.until(`document.querySelectorAll('` + row + `').length === 2`)
	page.until(`document.querySelector('` + row + `:first-child').innerText.includes('the-second') && document.querySelector('` + row +
		`:first-child .state').innerText === '404'`)

	page.do(chromedp.SendKeys(chromedp.CSS(`#finished-form [name="id"]`), "the-first"))
	page.press("\r")
	page.until(`document.querySelectorAll('` + row + `').length === 1 && document.querySelector('` + row + `').innerText.includes('gpu-')`)
	page.do(chromedp.SendKeys(chromedp.CSS(`#finished-form [name="slower_than"]`), "long"))
	page.press("\r")
	page.shows("#finished-error", "slower_than is not a duration such as 500ms or 10s")
	page.do(chromedp.Click(chromedp.CSS(`#finished-form [type="reset"]`)))
	page.until(`document.querySelectorAll('` + row + `').length === 2 && document.querySelector('#finished-error').hidden`)
	page.do(chromedp.SendKeys(chromedp.CSS(`#finished-form [name="until"]`), "1h"))
	page.press("\r")
	page.shows("#finished-empty", "No finished request is known that matches.")
	page.do(chromedp.Click(chromedp.CSS(`#finished-form [type="reset"]`)))
	page.until(`document.querySelectorAll('` + row + `').length === 2`)
	page.do(chromedp.SendKeys(chromedp.CSS(`#finished-form [name="status"]`), "5xx"))
	page.press("\r")
	page.shows("#finished-empty", "No finished request is known that matches.")
	if evaluate[bool](page, `document.body.innerText.includes('not to be shown')`) {
		t.Error("a prompt is shown")
	}
}

func TestPageNamesPrefillBackend(t *testing.T) {
	replica := sim.Config{Connector: sim.ConnectorConfig{Enabled: true}}
	prefill, _ := startSimReplica(t, replica, "127.0.0.1:0")
	decode, _ := startSimReplica(t, replica, "127.0.0.1:0")
	yaml := fmt.Sprintf("disaggregation: {min_uncached_tokens: 1}\nbackends: [{name: first, url: %q, role: prefill}, {name: second, url: "+
		"%q, role: decode}]\n", prefill, decode)
	proxy := startProgram(t, "--config", (&simFleet{}).configFile(t, yaml).path)
	proxy.eventually("a request is split", func() bool {
		_ = askStream(http.DefaultClient, proxy.url, words(50), 3, nil)
		return metricSum(t, proxy.admin, "warmroute_split_requests_total", "split") > 0
	})
	page := openPage(t, proxy.admin)
	page.until(`document.querySelector('#finished').innerText.includes('first → second')`)
}
