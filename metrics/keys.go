package metrics

import "github.com/prometheus/client_golang/prometheus"

// NotLetInFor is why a request was refused for its API key.
type NotLetInFor string

// All that there are.
const (
	NoKey      NotLetInFor = "missing"
	UnknownKey NotLetInFor = "unknown"
	ExpiredKey NotLetInFor = "expired"
)

// NotLetIn records a request that came without a valid API key.
func (m *Metrics) NotLetIn(why NotLetInFor) { m.unauthorized.WithLabelValues(string(why)).Inc() }

// KeyUse is what one API key was used for. Name is the configuration's.
type KeyUse struct {
	Name                           string
	InFlight                       int64
	Requests                       int64
	PromptTokens, CompletionTokens int64
	Refused                        map[string]int64 // by reason, of which there are few
}

// WatchKeys has read asked at each scrape for the keys that there are. It may be
// called once.
func (m *Metrics) WatchKeys(read func() []KeyUse) { m.registry.MustRegister(keyUses(read)) }

// keyUses reads what stands with the keys, so that a key that is gone is gone from
// the metrics, whatever requests of it still end.
type keyUses func() []KeyUse

func perKey(name, help string, more ...string) *prometheus.Desc {
	return prometheus.NewDesc("warmroute_"+name, help, append([]string{"key"}, more...), nil)
}

var (
	keyInFlight   = perKey("key_in_flight", "Requests of the API key that have not ended.")
	keyRequests   = perKey("key_requests_total", "Requests of the API key that were let in.")
	keyPrompt     = perKey("key_prompt_tokens_total", "Prompt tokens that the API key used, as the replica counted them where it did, else about.")
	keyCompletion = perKey("key_completion_tokens_total", "Tokens of answers that the API key used, as the replica counted them where it did, else one an event.")
	keyRefused    = perKey("key_refusals_total", "Requests of the API key beyond its bounds, by which: requests, tokens, concurrency.", "reason")
)

func (keyUses) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{keyInFlight, keyRequests, keyPrompt, keyCompletion, keyRefused} {
		ch <- d
	}
}

func (read keyUses) Collect(ch chan<- prometheus.Metric) {
	for _, k := range read() {
		count := func(d *prometheus.Desc, n int64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), append([]string{k.Name}, labels...)...)
		}
		ch <- prometheus.MustNewConstMetric(keyInFlight, prometheus.GaugeValue, float64(k.InFlight), k.Name)
		count(keyRequests, k.Requests)
		count(keyPrompt, k.PromptTokens)
		count(keyCompletion, k.CompletionTokens)
		for reason, n := range k.Refused {
			count(keyRefused, n, reason)
		}
	}
}
