package cluster

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/gomodule/redigo/redis"
)

func TestParseRedirection(t *testing.T) {
	for _, c := range []struct {
		err  error
		want *redirection
	}{
		{nil, nil},
		{errors.New("MOVED 1 a:1"), nil}, // not of the server
		{redis.Error("ERR unknown command"), nil},
		{redis.Error("MOVED 3999 10.0.0.5:6380"), &redirection{"10.0.0.5:6380", false}},
		{redis.Error("MOVED 3999 :6380"), &redirection{"node:6380", false}},
		{redis.Error("ASK 3999 [::1]:6380"), &redirection{"[::1]:6380", true}},
		{redis.Error("MOVED 3999"), nil},
		{redis.Error("MOVED 3999 nowhere"), nil},
		{redis.Error(""), nil},
	} {
		if got := parseRedirection(c.err, "node:6379"); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%v: %+v, want %+v", c.err, got, c.want)
		}
	}
}

func TestParseStreamReply(t *testing.T) {
	entry := func(id string, fields ...any) any { return []any{[]byte(id), fields} }
	stream := func(entries ...any) any { return []any{[]any{[]byte("stream"), entries}} }
	for _, c := range []struct {
		reply any
		want  []streamEntry
	}{
		{nil, nil},
		{stream(), nil},
		{stream(entry("1-0", []byte("m"), []byte("one")), entry("2-0", []byte("x"), []byte("y"), []byte("m"), []byte(""))), []streamEntry{{"1-0", []byte("one")}, {"2-0", []byte("")}}},
		{stream(entry("1-0", []byte("x"), []byte("one")), []any{[]byte("2-0"), nil}), []streamEntry{{"1-0", nil}, {"2-0", nil}}},
	} {
		if got, err := parseStreamReply(c.reply); err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%v: %v, %v, want %v", c.reply, got, err, c.want)
		}
	}
	for _, reply := range []any{"OK", int64(1), []any{}, []any{nil}, []any{[]any{[]byte("stream")}}, stream(nil), stream([]any{nil, nil}), stream("x")} {
		if got, err := parseStreamReply(reply); err == nil {
			t.Errorf("%v: %v", reply, got)
		}
	}
}

// FuzzStreamReply asserts that no shape of a reply makes the parser fail but by an error. The input is the reply as JSON.
func FuzzStreamReply(f *testing.F) {
	f.Add(`[["stream",[["1-0",["m","data"]],["2-0",null]]]]`)
	f.Add(`[["stream",[[1,["m"]]]]]`)
	f.Add(`{}`)
	f.Fuzz(func(t *testing.T, text string) {
		var value any
		if json.Unmarshal([]byte(text), &value) != nil {
			return
		}
		entries, err := parseStreamReply(asReply(value))
		for _, e := range entries {
			if err != nil || !strings.Contains(text, `"`) || e.id == "" && !strings.Contains(text, `""`) {
				t.Errorf("%s: %v, %v", text, entries, err)
			}
		}
	})
}

// asReply returns a JSON value as the client has replies.
func asReply(value any) any {
	switch v := value.(type) {
	case string:
		return []byte(v)
	case float64:
		return int64(v)
	case []any:
		for i := range v {
			v[i] = asReply(v[i])
		}
		return v
	}
	return nil
}
