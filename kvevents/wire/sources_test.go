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
			body: `{"1":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5558","replay_endpoint":"tcp://0.0.0.0:6558","buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":"kv"},
				"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":null,"topic":""}}`,
			host: "replica-a",
			want: []Source{{Rank: 0, Endpoint: "tcp://replica-a:5557"}, {Rank: 1, Endpoint: "tcp://replica-a:5558", Replay: "tcp://replica-a:6558", Topic: "kv"}},
		},
		"array": {
			body: ` [{"data_parallel_rank":4,"endpoint":"tcp://[::]:5557","replay_endpoint":"tcp://10.0.0.9:5560","topic":"kv"},{"endpoint":"tcp://:::5556"}]`,
			host: "fd00::5",
			want: []Source{{Rank: 0, Endpoint: "tcp://[fd00::5]:5556"}, {Rank: 4, Endpoint: "tcp://[fd00::5]:5557", Replay: "tcp://10.0.0.9:5560", Topic: "kv"}},
		},
		"off": {
			body: `{"0":{"enable_kv_cache_events":false,"publisher":"zmq","endpoint":"tcp://*:1"},"1":{"publisher":"null","endpoint":"tcp://*:2"},"2":{"publisher":"kafka","endpoint":"k"}}`,
			host: "a",
		},
		"none":       {body: `{}`, host: "a"},
		"empty list": {body: `[]`, host: "a"},
		"ipc": {
			body: `[{"data_parallel_rank":0,"endpoint":"ipc:///tmp/kv"},{"data_parallel_rank":1,"endpoint":"tcp://b:1"}]`,
			host: "a", want: []Source{{Rank: 1, Endpoint: "tcp://b:1"}}, err: "rank 0: endpoint \"ipc:///tmp/kv\": ipc reaches processes of the replica's own machine only: start vLLM with",
		},
		"inproc replay": {
			body: `[{"endpoint":"tcp://b:1","replay_endpoint":"inproc://cache_dp1"}]`,
			host: "a", want: []Source{{Endpoint: "tcp://b:1"}}, err: "replay_endpoint \"inproc://cache_dp1\": inproc reaches",
		},
		"loopback":            {body: `[{"endpoint":"tcp://127.0.0.1:5557"}]`, host: "10.0.0.5", err: "start vLLM with tcp://*:5557"},
		"loopback on our own": {body: `[{"endpoint":"tcp://localhost:5557"}]`, host: "127.0.0.1", want: []Source{{Endpoint: "tcp://localhost:5557"}}},
		"no endpoint":         {body: `[{"topic":"kv"}]`, host: "a", err: "not of the form"},
		"no port":             {body: `[{"endpoint":"tcp://b"}]`, host: "a", err: "no port"},
		"port 0":              {body: `[{"endpoint":"tcp://b:0"}]`, host: "a", err: "not from 1 to 65535"},
		"port":                {body: `[{"endpoint":"tcp://b:70000"}]`, host: "a", err: "not from 1 to 65535"},
		"scheme":              {body: `[{"endpoint":"udp://b:1"}]`, host: "a", err: "only tcp can be used"},
		"rank":                {body: `[{"data_parallel_rank":-1,"endpoint":"tcp://b:1"}]`, host: "a", err: "rank -1"},
		"rank not a number":   {body: `{"a":{"endpoint":"tcp://b:1"}}`, host: "a", err: "parse KV event sources"},
		"rank twice":          {body: `[{"endpoint":"tcp://b:1"},{"endpoint":"tcp://b:2"}]`, host: "a", err: "listed twice"},
		"not JSON":            {body: `<html>`, host: "a", err: "parse KV event sources"},
		"null":                {body: `null`, host: "a"},
		"empty":               {body: ``, host: "a", err: "parse KV event sources"},
		"wrong type":          {body: `{"0":{"endpoint":5}}`, host: "a", err: "parse KV event sources"},
		"too long":            {body: "[]" + strings.Repeat(" ", MaxSourcesBytes), host: "a", err: "the limit is"},
		"many":                {body: "[" + strings.TrimSuffix(strings.Repeat(`{"endpoint":"tcp://b:1"},`, maxRanks+1), ",") + "]", host: "a", err: "the limit is"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ParseSources([]byte(c.body), c.host)
			if !slices.Equal(got, c.want) {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
			if (err == nil) != (c.err == "") || !strings.Contains(fmt.Sprint(err), c.err) {
				t.Errorf("error %v, want %q", err, c.err)
			}
		})
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
