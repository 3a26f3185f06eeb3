package proxy

import (
	"strings"
	"testing"

	"warmroute/backends"
	"warmroute/proxy/admit"
)

func TestClientKeyRemovedFromRequest(t *testing.T) {
	r := &replica{key: "the-replicas-own", script: always(answered("200 OK", whole))}
	f := serve(t, withKeys(keyOf("a", nil)), r)
	secret := secretOf("a")
	f.post("/v1/chat/completions?api_key="+secret+"&beta=true&x=1%20"+strings.ReplaceAll(secret, "-", "%2D")+"&KEY=other&y=%zz"+secret+"&z",
		askWhole, append(bearer("a"),
			"X-Api-Key", secret, "Api-Key", secret, "Cookie", "session="+secret, "Proxy-Authorization", "Bearer "+secret, "X-Goog-Api-Key", secret,
			"X-Anything", "k="+secret+";", "X-Session-Id", secret, "X-Request-Id", secret, "Referer", "http://x/?key="+secret,
			"Connection", "X-Hop", "X-Hop", secret, "Traceparent", "00-1-2-01", "Origin", "http://page.example")...)
	f.post("/v1/messages", askWhole, "X-Api-Key", secret, "X-Other", secret)
	seen := r.requests()
	if len(seen) != 2 {
		t.Fatalf("the replica saw %d requests", len(seen))
	}
	for _, q := range seen {
		var all strings.Builder
		q.Header.Write(&all)
		all.WriteString(q.RequestURI)
		if strings.Contains(all.String(), secret) || strings.Contains(q.Header.Get("Origin"), "page") || strings.Contains(all.String(), "%2D") {
			t.Errorf("the replica saw\n%s", all.String())
		}
		if q.Header.Get("Authorization") != "Bearer the-replicas-own" {
			t.Errorf("the replica was shown %q", q.Header.Get("Authorization"))
		}
	}
	if q := seen[0]; q.URL.RawQuery != "beta=true&z" || q.Header.Get("Traceparent") == "" {
		t.Errorf("what is no key was taken away: %s, %v", q.URL.RawQuery, q.Header)
	}
	if strings.Contains(f.log.String(), secret) {
		t.Error("the key is in the log")
	}
}

func TestRedactQuery(t *testing.T) {
	for query, want := range map[string]string{
		"": "", "beta=true": "beta=true", "a=1&b=&c": "a=1&b=&c", "api_key=x": "", "a=1&Api-Key=x&b=2": "a=1&b=2",
		"%61pi_key=x&key": "", "keys=1&monkey=2": "keys=1&monkey=2", "a=1;key=2": "a=1;key=2", "&&": "&&", "%zz=1": "%zz=1",
	} {
		if got := admit.RedactQuery(query, ""); got != want {
			t.Errorf("%q becomes %q, want %q", query, got, want)
		}
	}
}

func FuzzRedactQuery(f *testing.F) {
	f.Add("api_key=x&a=1")
	f.Add("%61pi_key=%zz&&;=")
	const secret = "the-secret-0123456789"
	f.Fuzz(func(t *testing.T, query string) {
		for _, s := range []string{"", secret} {
			got := admit.RedactQuery(query+"&a="+secret+"&"+query, s)
			if s != "" && strings.Contains(got, secret) || len(got) > 2*len(query)+len(secret)+4 {
				t.Fatalf("%q becomes %q", query, got)
			}
			if again := admit.RedactQuery(got, s); again != got {
				t.Fatalf("%q becomes %q, and that %q", query, got, again)
			}
		}
	})
}

func TestPanicLogHidesRequest(t *testing.T) {
	f := serve(t, func(o *Options) {
		withKeys(keyOf("a", nil))(o)
		o.RecheckHealth = func(*backends.Backend) { panic("in the midst of a request") }
	}, &replica{script: always("MARKED\r\n\r\n")})
	if _, _, err := f.try("/v1/chat/completions", strings.ReplaceAll(askWhole, "What", "MARKED"), bearer("a")...); err == nil {
		t.Error("an answer behind a panic")
	}
	eventually(t, "the panic is logged", func() bool { return strings.Contains(f.log.String(), "in the midst of a request") })
	if log := f.log.String(); strings.Contains(log, "MARKED") || strings.Contains(log, secretOf("a")) {
		t.Errorf("the log shows what was asked:\n%s", log)
	}
	f.awaitMetric(`warmroute_key_in_flight{key="a"} 0`)
}
