package proxy

import (
	"fmt"
	"strings"
	"testing"

	"warmroute/proxy/apikey"
	"warmroute/usage"
)

func TestUsageOfKeys(t *testing.T) {
	table := usage.NewInMemory()
	noUsage := strings.Split(whole, `,"usage"`)[0] + "}"
	answers := []string{answered("200 OK", whole), answered("200 OK", noUsage), answered("400 Bad Request", "{}")}
	f := serve(t, func(o *Options) {
		withKeys(keyOf("a", nil), keyOf("b", nil))(o)
		o.Usage = table
	}, &replica{script: func(s *session) {
		for _, answer := range answers {
			if _, ok := s.request(); !ok {
				return
			}
			s.say(answer)
		}
	}})
	for range answers {
		f.post("/v1/chat/completions", askWhole, bearer("a")...)
	}
	f.post("/v1/chat/completions", "no body", bearer("b")...)
	f.post("/v1/chat/completions", askWhole, bearer("unknown")...)
	eventually(t, "the requests are counted", func() bool { return table.OfKey("a").Requests == 3 && table.OfKey("b").Requests == 1 })
	prompt, output := int64(f.promptTokens(askWhole, bearer("a")...)), int64(len(noUsage)/bytesPerToken)
	a := table.OfKey("a")
	if a.SavedPrefillSeconds <= 0 {
		t.Errorf("%v s saved", a.SavedPrefillSeconds)
	}
	a.SavedPrefillSeconds, a.QueueSeconds = 0, 0
	cached := a.EstimatedCachedTokens // predicted from the first request, which had the same prompt
	if want := (usage.Counts{
		Requests: 3, Errors: 1, PromptTokens: 12 + prompt, CachedTokens: 8 + cached, OutputTokens: 3 + output,
		EstimatedTokens: prompt + output, EstimatedCachedTokens: cached,
	}); a != want || cached == 0 {
		t.Errorf("a has used %+v, want %+v", a, want)
	}
	if b := table.OfKey("b"); b != (usage.Counts{Requests: 1, Errors: 1}) {
		t.Errorf("b has used %+v", b)
	}
	r, err := table.Report(usage.Query{})
	if err != nil || r.Total.Requests != 4 {
		t.Errorf("%+v, %v: requests without a key are not counted", r, err)
	}
	f.awaitMetric(`warmroute_key_errors_total{key="b"} 1`)
	f.awaitMetric(fmt.Sprintf(`warmroute_key_cached_tokens_total{key="a"} %d`, 8+cached))
	f.awaitMetric(`warmroute_cached_tokens_total{backend="r0",cached_tokens="reported",model="m"} 8`)
	f.awaitMetric(fmt.Sprintf(`warmroute_cached_tokens_total{backend="r0",cached_tokens="predicted",model="m"} %d`, cached))
	for key, n := range f.proxy.CountInFlightByKey() {
		if n != 0 {
			t.Errorf("%s has %d requests in flight", key, n)
		}
	}
}

func TestInvalidUsageIsBounded(t *testing.T) {
	table := usage.NewInMemory()
	answer := strings.NewReplacer(`"prompt_tokens":12`, `"prompt_tokens":9000000000000000000`, `"completion_tokens":3`,
		`"completion_tokens":9000000000000000000`, `"cached_tokens":8`, `"cached_tokens":-5`).Replace(whole)
	f := serve(t, func(o *Options) { o.Usage = table }, &replica{script: always(answered("200 OK", answer))})
	f.post("/v1/chat/completions", askWhole)
	eventually(t, "the request is counted", func() bool { return table.OfKey("").Requests == 1 })
	if c := table.OfKey(""); c.PromptTokens < 0 || c.PromptTokens > apikey.MaxTokens || c.OutputTokens > apikey.MaxTokens ||
		c.CachedTokens < 0 {
		t.Errorf("got %+v", c)
	}
}
