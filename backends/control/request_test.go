package control

import (
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestParseRequest(t *testing.T) {
	for _, c := range []struct {
		name, body string
		want       Request
	}{
		{"sleep", "", Request{Action: &sleep{Level: 1, Wait: defaultWait}, Timeout: defaultTimeout}},
		{"sleep", ` {"level":0,"wait":"0s","force":true,"timeout":"5m","backends":["a","b"]} `,
			Request{Action: &sleep{Level: 0, Force: true}, Timeout: Duration(5 * time.Minute), Backends: []string{"a", "b"}}},
		{"wake", `{"tags":["weights"]}`, Request{Action: &wake{Tags: []string{"weights"}}, Timeout: defaultTimeout}},
		{"pause", `{"mode":"keep","clear_cache":true}`, Request{Action: &pause{Mode: "keep", ClearCache: true, Wait: defaultWait},
			Timeout: defaultTimeout}},
		{"resume", "{}", Request{Action: &resume{}, Timeout: defaultTimeout}},
		{"reset-cache", `{"force":true}`, Request{Action: &resetCache{Wait: defaultWait, Force: true}, Timeout: defaultTimeout}},
		{"load-adapter", `{"adapter":"a","path":"/a","in_place":true}`, Request{Action: &loadAdapter{"a", "/a", true}, Timeout: defaultTimeout}},
		{"unload-adapter", `{"adapter":"a"}`, Request{Action: &unloadAdapter{"a"}, Timeout: defaultTimeout}},
	} {
		if got, err := ParseRequest(c.name, []byte(c.body)); err != nil || !reflect.DeepEqual(*got, c.want) {
			t.Errorf("%s %s: %+v, %v", c.name, c.body, got, err)
		}
	}
}

func TestParseInvalidRequest(t *testing.T) {
	for _, c := range []struct{ name, body, want string }{
		{"dance", "", "unknown action"},
		{"sleep", `{"level":3}`, "level must be from 0 to 2"},
		{"sleep", `{"wait":"2h"}`, "wait must be from 0s to 1h0m0s"},
		{"sleep", `{"wait":"-1s"}`, "wait must be"},
		{"sleep", `{"wait":60}`, "not a valid request"},
		{"sleep", `{"timeout":"1ms"}`, "timeout must be from 100ms"},
		{"sleep", `{"mode":"abort"}`, `unknown field "mode"`},
		{"resume", `{"Backends":["a"]}`, `unknown field "Backends"`},
		{"resume", `{"backends":[]}`, "backends is empty"},
		{"resume", `{"backends":null}`, "backends is empty"},
		{"resume", `{"backends":["` + strings.Repeat(`a","`, maxBackends) + `"]}`, "more than"},
		{"resume", `{"backends":"a"}`, "not a valid request"},
		{"resume", `[]`, "not a valid request"},
		{"resume", `{`, "not a valid request"},
		{"resume", `{} {}`, "more than one JSON value"},
		{"pause", `{"mode":"stop"}`, "mode must be wait, keep or abort"},
		{"wake", `{"tags":["1","2","3","4","5","6","7","8","9"]}`, "tags has more than"},
		{"load-adapter", `{"adapter":"a"}`, "path is missing"},
		{"load-adapter", `{"path":"a"}`, "adapter is missing"},
		{"unload-adapter", ``, "adapter is missing"},
	} {
		if r, err := ParseRequest(c.name, []byte(c.body)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s %.60s: %+v, %v, want %q", c.name, c.body, r, err, c.want)
		}
	}
}

func FuzzParseRequest(f *testing.F) {
	f.Add("sleep", []byte(`{"level":0,"wait":"0s","force":true,"timeout":"5m","backends":["a","b"]}`))
	f.Add("pause", []byte(`{"mode":"keep","clear_cache":true}`))
	f.Add("load-adapter", []byte(`{"adapter":"a","path":"/a","in_place":true}`))
	f.Fuzz(func(t *testing.T, name string, body []byte) {
		if r, err := ParseRequest(name, body); err == nil && (r.Timeout < Duration(time.Second/10) || len(r.Backends) > maxBackends) {
			t.Errorf("got %+v", r)
		}
	})
}
