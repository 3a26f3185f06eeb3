package wire

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestParseSources(t *testing.T) {
	for name, c := range map[string]struct {
		body, host string
		want       []Source
		err        string // part of the error; "": none
	}{
		"object": {
			body: `{"1":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5558","replay_endpoint":"tcp://0.0.0.0:6558",` +
				`"buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":"kv"},
				"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":null,"topic":""}}`,
			host: "replica-a",
			want: []Source{{Rank: 0, Endpoint: "tcp://replica-a:5557"}, {Rank: 1, Endpoint: "tcp://replica-a:5558", Replay: "tcp://replica-a:6558",
				Topic: "kv"}},
		},
		"array": {
			body: ` [{"data_parallel_rank":4,"endpoint":"tcp://[::]:5557","replay_endpoint":"tcp://10.0.0.9:5560","topic":"kv"},` +
				`{"endpoint":"tcp://:::5556"}]`,
			host: "fd00::5",
			want: []Source{{Rank: 0, Endpoint: "tcp://[fd00::5]:5556"}, {Rank: 4, Endpoint: "tcp://[fd00::5]:5557", Replay: "tcp://10.0.0.9:5560",
				Topic: "kv"}},
		},
		"off": {
			body: `{"0":{"enable_kv_cache_events":false,"publisher":"zmq","endpoint":"tcp://*:1"},"1":{"publisher":"null",` +
				`"endpoint":"tcp://*:2"},"2":{"publisher":"kafka","endpoint":"k"}}`,
			host: "a",
		},
		"none":       {body: `{}`, host: "a"},
		"empty list": {body: `[]`, host: "a"},
		"ipc": {
			body: `[{"data_parallel_rank":0,"endpoint":"ipc:///tmp/kv"},{"data_parallel_rank":1,"endpoint":"tcp://b:1"}]`,
			host: "a", want: []Source{{Rank: 1, Endpoint: "tcp://b:1"}},
			err: "rank 0: endpoint \"ipc:///tmp/kv\": ipc reaches processes of the replica's own machine only: start vLLM with",
		},
		"inproc replay": {
			body: `[{"endpoint":"tcp://b:1","replay_endpoint":"inproc://cache_dp1"}]`,
			host: "a", want: []Source{{Endpoint: "tcp://b:1"}}, err: "replay_endpoint \"inproc://cache_dp1\": inproc reaches",
		},
		"loopback": {body: `[{"endpoint":"tcp://127.0.0.1:5557"}]`, host: "10.0.0.5", err: "start vLLM with tcp://*:5557"},
		"loopback on our own": {body: `[{"endpoint":"tcp://localhost:5557"}]`, host: "127.0.0.1",
			want: []Source{{Endpoint: "tcp://localhost:5557"}}},
		"no endpoint":       {body: `[{"topic":"kv"}]`, host: "a", err: "not of the form"},
		"no port":           {body: `[{"endpoint":"tcp://b"}]`, host: "a", err: "no port"},
		"port 0":            {body: `[{"endpoint":"tcp://b:0"}]`, host: "a", err: "not from 1 to 65535"},
		"port":              {body: `[{"endpoint":"tcp://b:70000"}]`, host: "a", err: "not from 1 to 65535"},
		"scheme":            {body: `[{"endpoint":"udp://b:1"}]`, host: "a", err: "only tcp can be used"},
		"rank":              {body: `[{"data_parallel_rank":-1,"endpoint":"tcp://b:1"}]`, host: "a", err: "rank -1"},
		"rank not a number": {body: `{"a":{"endpoint":"tcp://b:1"}}`, host: "a", err: "parse KV event sources"},
		"rank twice":        {body: `[{"endpoint":"tcp://b:1"},{"endpoint":"tcp://b:2"}]`, host: "a", err: "listed twice"},
		"not JSON":          {body: `<html>`, host: "a", err: "parse KV event sources"},
		"null":              {body: `null`, host: "a"},
		"empty":             {body: ``, host: "a", err: "parse KV event sources"},
		"wrong type":        {body: `{"0":{"endpoint":5}}`, host: "a", err: "parse KV event sources"},
		"too long":          {body: "[]" + strings.Repeat(" ", MaxSourcesBytes), host: "a", err: "the limit is"},
		"many": {body: "[" + strings.TrimSuffix(strings.Repeat(`{"endpoint":"tcp://b:1"},`, maxRanks+1), ",") + "]", host: "a",
			err: "the limit is"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ParseSources([]byte(c.body), c.host, Ports{})
			if !slices.Equal(got, c.want) {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
			if (err == nil) != (c.err == "") || !strings.Contains(fmt.Sprint(err), c.err) {
				t.Errorf("error %v, want %q", err, c.err)
			}
		})
	}
}

// A publisher that has bound an endpoint is told apart from one that connects to us.
func TestSourcesThatConnect(t *testing.T) {
	for name, c := range map[string]struct {
		endpoint, host string
		connects       bool
	}{
		"any interface":                     {"tcp://*:5557", "10.0.0.5", false},
		"any interface of IPv6":             {"tcp://[::]:5557", "10.0.0.5", false},
		"another host":                      {"tcp://warmroute:6000", "10.0.0.5", true},
		"a free port that the replica took": {"tcp://10.0.0.5:39211", "10.0.0.5", false},
		"this machine":                      {"tcp://127.0.0.1:5558", "localhost", true},
		"this machine, a port of another":   {"tcp://127.0.0.1:5559", "localhost", false},
	} {
		body := `{"0":{"endpoint":"` + c.endpoint + `","replay_endpoint":"tcp://*:6557","topic":"kv@10.0.0.5:8000@m"}}`
		for _, ours := range []Ports{{5557, 2}, {}} {
			got, err := ParseSources([]byte(body), c.host, ours)
			if ours.Count == 0 && err != nil {
				continue // an address that cannot be reached from here
			}
			if err != nil || len(got) != 1 || (got[0].Endpoint == "") != (c.connects && ours.Count > 0) || got[0].Replay != "tcp://"+c.host+":6557" {
				t.Errorf("%s: got %+v, %v", name, got, err)
			}
		}
	}
	got, err := ParseSources([]byte(`{"0":{"endpoint":"tcp://warmroute:5557","topic":"kv-events"}}`), "10.0.0.5", Ports{5557, 1})
	if len(got) > 0 || err == nil || !strings.Contains(err.Error(), `topic "kv-events": the topic is not of the form kv@ADDRESS@MODEL`) {
		t.Errorf("a topic that names no replica: got %+v, %v", got, err)
	}
}

func TestListenAddresses(t *testing.T) {
	for _, c := range []struct {
		endpoint string
		ports    int
		want     string // the addresses, or a part of the error
	}{
		{"tcp://*:5557", 1, "[:5557]"},
		{"tcp://127.0.0.1:5557", 2, "[127.0.0.1:5557 127.0.0.1:5558]"},
		{"tcp://[::1]:0", 1, "[[::1]:0]"},
		{"tcp://kv.internal:65535", 1, "[kv.internal:65535]"},
		{"tcp://*:65535", 2, "the last of 2 ports from 65535 on exceeds 65535"},
		{"tcp://*:0", 2, "port 0 is a free one"},
		{":5557", 1, "not of the form tcp://HOST:PORT"},
		{"ipc:///tmp/kv", 1, "ipc reaches"},
		{"tcp://*", 1, "no port"},
		{"tcp://*:kv", 1, `port "kv" is not from 1`},
	} {
		got, err := ListenAddresses(c.endpoint, c.ports)
		if text := fmt.Sprint(got, err); !strings.Contains(text, c.want) || (err == nil) != strings.HasPrefix(c.want, "[") {
			t.Errorf("%s, %d ports: got %v, %v, want %s", c.endpoint, c.ports, got, err, c.want)
		}
	}
}

func TestParseTopic(t *testing.T) {
	for _, c := range []struct {
		text string
		want Topic
		ok   bool
	}{
		{"kv@10.0.0.5@qwen", Topic{"10.0.0.5", "", "qwen"}, true},
		{"kv@10.0.0.5:8000@Qwen/Qwen3-8B", Topic{"10.0.0.5", "8000", "Qwen/Qwen3-8B"}, true},
		{"kv@VLLM-0.vllm:8000@a@b", Topic{"vllm-0.vllm", "8000", "a@b"}, true},
		{"kv@fd00:0::5@m", Topic{"fd00::5", "", "m"}, true},
		{"kv@[fd00:0::5]:8000@m", Topic{"fd00::5", "8000", "m"}, true},
		{"kv@::ffff:10.0.0.5@m", Topic{"10.0.0.5", "", "m"}, true},
		{"kv-events", Topic{}, false},
		{"", Topic{}, false},
		{"kv@10.0.0.5", Topic{}, false},
		{"kv@10.0.0.5@", Topic{}, false},
		{"kv@@m", Topic{}, false},
		{"kv@:8000@m", Topic{}, false},
		{"kv@10.0.0.5:@m", Topic{}, false},
		{"kv@http://10.0.0.5:8000@m", Topic{}, false},
		{"kv@10.0.0.5@" + strings.Repeat("m", MaxTopicBytes), Topic{}, false},
	} {
		if got, err := ParseTopic(c.text); got != c.want || (err == nil) != c.ok {
			t.Errorf("%.60s: got %+v, %v", c.text, got, err)
		}
	}
}

func TestConfiguredSources(t *testing.T) {
	got, err := ConfiguredSources("tcp://*:5557", "tcp://replay:6557", "kv", "replica", 3)
	want := []Source{
		{Rank: 0, Endpoint: "tcp://replica:5557", Replay: "tcp://replay:6557", Topic: "kv"},
		{Rank: 1, Endpoint: "tcp://replica:5558", Replay: "tcp://replay:6558", Topic: "kv"},
		{Rank: 2, Endpoint: "tcp://replica:5559", Replay: "tcp://replay:6559", Topic: "kv"},
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %+v, %v", got, err)
	}
	for name, c := range map[string]struct {
		endpoint, replay string
		ranks            int
	}{
		"no rank":          {"tcp://a:1", "", 0},
		"many ranks":       {"tcp://a:1", "", maxRanks + 1},
		"port of a rank":   {"tcp://a:65535", "", 2},
		"ipc":              {"ipc:///tmp/a", "", 1},
		"replay ipc":       {"tcp://a:1", "ipc:///tmp/a", 1},
		"port of a replay": {"tcp://a:1", "tcp://a:65535", 2},
		"no scheme":        {"a:1", "", 1},
	} {
		if got, err := ConfiguredSources(c.endpoint, c.replay, "", "replica", c.ranks); err == nil {
			t.Errorf("%s: no error, but %+v", name, got)
		}
	}
}
