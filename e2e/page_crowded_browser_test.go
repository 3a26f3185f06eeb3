//go:build browser

package e2e

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/profiler"
	"github.com/chromedp/chromedp"

	"warmroute/admin"
	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/config"
	"warmroute/fleet"
	"warmroute/metrics"
	"warmroute/proxy"
	"warmroute/proxy/apikey"
	"warmroute/router"
	"warmroute/usage"
)

var screenshotDir = flag.String("screenshots", "",
	"write screenshots of the live page of a large fleet to this `DIRECTORY`, and measure its scripts")

const (
	crowdedBackends = 64
	crowdedModels   = 200
	crowdedRequests = 10_000
)

// startCrowdedPage starts an admin listener of a proxy with many backends and models that has served many requests,
// and returns its URL.
func startCrowdedPage(t *testing.T) (url string) {
	t.Helper()
	replica := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if strings.Contains(string(body), "fail") {
			w.WriteHeader(http.StatusBadRequest)
			io.WriteString(w, `{"error":{"message":"bad","type":"BadRequestError","code":400}}`)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for _, event := range []string{
			`{"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":"Hello"}}]}`,
			`{"id":"c","object":"chat.completion.chunk","model":"m","choices":[],"usage":{"prompt_tokens":120,"total_tokens":123,` +
				`"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":80}}}`,
			"[DONE]",
		} {
			fmt.Fprintf(w, "data: %s\n\n", event)
		}
	}))
	t.Cleanup(replica.Close)
	var list []*backends.Backend
	for i := range crowdedBackends {
		u, err := backends.ParseURL(fmt.Sprintf("%s/%d", replica.URL, i))
		if err != nil {
			t.Fatal(err)
		}
		tr := transport.New(transport.Options{URL: u, IdleTimeout: 10 * time.Second})
		t.Cleanup(tr.CloseIdleConnections)
		list = append(list, backends.New(fmt.Sprintf("gpu-%02d.rack-%d.example.com", i, i/8), u, "", tr))
	}
	registry, err := backends.NewRegistry(list)
	if err != nil {
		t.Fatal(err)
	}
	model := func(i int) string { return fmt.Sprintf("example-org/a-model-of-some-size-%03d", i) }
	for i, b := range list {
		var models []backends.Model
		for n := i; n < crowdedModels; n += 16 {
			models = append(models, backends.Model{ID: model(n), Root: model(n), Card: fmt.Appendf(nil, `{"id":%q}`, model(n))})
		}
		b.SetModels(models)
		b.SetState(backends.Ready)
		b.SetLoad(&backends.Load{QueuesKnown: true, Running: i, KVKnown: true, KVCacheUsage: float64(i) / crowdedBackends, PolledAt: time.Now()})
	}
	log := slog.New(slog.DiscardHandler)
	r, err := router.New(router.Options{
		Settings: router.Settings{Policy: "prefix", PollInterval: time.Hour},
		Backends: registry.All(), Catalog: registry.Catalog, BlockBytes: 256, IndexMaxBytes: 1 << 20, Now: time.Now, Rand: rand.NewPCG(1, 2),
	})
	if err != nil {
		t.Fatal(err)
	}
	used := usage.NewInMemory()
	p := proxy.New(proxy.Options{
		Usage: used, Registry: registry, Router: r, Metrics: metrics.New(registry, r, "test"), Log: log, BlockBytes: 256, Keys: apikey.New(nil),
		RecheckHealth: func(*backends.Backend) {},
		Settings:      proxy.Settings{Attempts: 2, Limits: proxy.Limits{InFlight: 100, BodyBytes: 64 << 10, BodyBytesTotal: 1 << 20}},
	})
	var initial *fleet.Initial
	if initial, err = fleet.NewInitial(t.Context(), &config.Config{}, log, nil); err != nil {
		t.Fatal(err)
	}
	initial.Registry = registry
	h := httptest.NewServer(admin.New(admin.Options{Registry: registry, Fleet: fleet.New(fleet.Options{Initial: initial}), Router: r, Proxy: p,
		Usage: used, Log: log, Version: "test"}))
	t.Cleanup(h.Close)

	public := httptest.NewServer(p)
	t.Cleanup(public.Close)
	send := func(i int) {
		content := strings.Repeat("some words ", 20)
		if i%50 == 0 {
			content = "fail"
		}
		body := fmt.Sprintf(`{"model":%q,"stream":true,"messages":[{"role":"user","content":%q}]}`, model(i%crowdedModels), content)
		resp, err := http.Post(public.URL+"/v1/chat/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Error(err)
			return
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	for i := range crowdedRequests {
		send(i)
	}
	ctx, stop := context.WithCancel(context.Background())
	var load sync.WaitGroup
	load.Go(func() { p.SampleQueue(ctx) })
	load.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			send(i)
			time.Sleep(50 * time.Millisecond)
		}
	})
	t.Cleanup(func() { stop(); load.Wait(); http.DefaultClient.CloseIdleConnections() })
	return h.URL
}

// profileScripts returns for how much of the next seconds the page's scripts run.
func (p *tab) profileScripts(length time.Duration) (spent time.Duration) {
	p.do(chromedp.Func(func(ctx context.Context, _ *chromedp.Target) error {
		for _, begin := range []cdp.Command[cdp.Empty, cdp.Empty]{profiler.Enable, profiler.Start} {
			if _, err := chromedp.Call(ctx, begin, cdp.Empty{}); err != nil {
				return err
			}
		}
		time.Sleep(length)
		got, err := chromedp.Call(ctx, profiler.Stop, cdp.Empty{})
		if err != nil {
			return err
		}
		isScript := map[int64]bool{}
		for _, n := range got.Profile.Nodes {
			isScript[n.ID] = !slices.Contains([]string{"(root)", "(idle)", "(program)"}, n.CallFrame.FunctionName)
		}
		for i, id := range got.Profile.Samples {
			if isScript[id] {
				spent += time.Duration(got.Profile.TimeDeltas[i]) * time.Microsecond
			}
		}
		return nil
	}))
	return spent
}

func TestPageOfLargeFleet(t *testing.T) {
	page := openPage(t, startCrowdedPage(t))
	page.until(`document.querySelectorAll('#backends tbody tr').length === 64 && document.querySelectorAll('#models tbody tr').length === 200`)
	page.until(`document.querySelectorAll('#finished tbody tr').length === 100 && ` +
		`document.querySelector('#finished-count').innerText.startsWith('the newest 100 of 10,000, ')`)
	page.until(`document.querySelector('#history-rate .line')?.getAttribute('d').length > 20 && ` +
		`document.querySelector('#history-model').options.length === 201`)
	// Below each chart are the times of its first, middle and last point.
	page.until(`[...document.querySelectorAll('.spark')].every((chart) => {
		const times = [...chart.nextElementSibling.children].map((t) => [t.innerText, Date.parse(t.dateTime)]);
		return times.length === 3 && times.every(([text]) => /^\d\d:\d\d(:\d\d)?$/.test(text)) && times[0][1] < times[1][1] && times[1][1] < times[2][1];
	})`)
	if *screenshotDir != "" {
		const seconds = 20
		t.Logf("%.1f ms of script a second", page.profileScripts(seconds*time.Second).Seconds()*1000/seconds)
	}
	for _, scheme := range []string{"light", "dark"} {
		page.prefers(scheme)
		for _, hard := range evaluate[[]string](page, contrasts) {
			t.Errorf("%s: hard to read: %s", scheme, hard)
		}
		for _, width := range []int64{1280, 390} {
			page.do(chromedp.EmulateViewport(width, 900))
			if wide := evaluate[int64](page, `document.documentElement.scrollWidth`); wide > width {
				t.Errorf("%s: at %d the page is %d wide", scheme, width, wide)
			}
			for _, what := range evaluate[[]string](page, cutOff) {
				t.Errorf("%s: at %d something is cut off or scrolls sideways: %s", scheme, width, what)
			}
			if *screenshotDir != "" {
				page.captureTo(filepath.Join(*screenshotDir, fmt.Sprintf("%s-%d.png", scheme, width)))
			}
		}
	}
}

// captureTo writes a screenshot of the whole page.
func (p *tab) captureTo(file string) {
	p.t.Helper()
	height := evaluate[int64](p, `document.documentElement.scrollHeight`)
	width := evaluate[int64](p, `document.documentElement.clientWidth`)
	p.do(chromedp.EmulateViewport(width, height))
	png, err := chromedp.Run(p.ctx, chromedp.CaptureScreenshot())
	if err != nil {
		p.t.Fatal(err)
	}
	if err := os.WriteFile(file, png, 0o644); err != nil {
		p.t.Fatal(err)
	}
}
