package vllm

import (
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// rankError returns the body of an error as vLLM writes it.
func rankError(message string) []byte {
	return []byte(`{"error":{"message":"` + message + `","type":"BadRequestError","param":null,"code":400}}`)
}

func TestParseRankError(t *testing.T) {
	const python, rust = "data_parallel_rank 65534 is out of range [0, 4).",
		"data parallel rank 65534 is not connected to this frontend; connected ranks: [4, 5, 6, 7]"
	for _, c := range []struct {
		name   string
		status int
		body   []byte
		want   RankError
		ok     bool
	}{
		{"Python front end", 400, rankError(python), RankError{Rank: 65534, Local: 4}, true},
		{"Rust front end", 400, rankError(rust), RankError{Rank: 65534, Connected: []int{4, 5, 6, 7}}, true},
		{"Messages", 400, []byte(`{"type":"error","error":{"type":"BadRequestError","message":"data_parallel_rank 65534 is out of range ` +
			`[0, 2)."}}`), RankError{Rank: 65534, Local: 2}, true},
		{"another status", 422, rankError(python), RankError{}, false},
		{"another error", 400, rankError("The model does not exist."), RankError{}, false},
		{"quoted by another error", 400, rankError("invalid prompt: " + python), RankError{}, false},
		{"no engine", 400, rankError("data_parallel_rank 3 is out of range [0, 0)."), RankError{Rank: 3}, false},
		{"no list", 400, rankError("data parallel rank 3 is not connected to this frontend; connected ranks: []"), RankError{}, false},
		{"a list without end", 400, rankError("data parallel rank 3 is not connected to this frontend; connected ranks: [1, 2"), RankError{},
			false},
		{"a list of something else", 400, rankError("data parallel rank 3 is not connected to this frontend; connected ranks: [a]"), RankError{},
			false},
		{"too many engines", 400, rankError("data_parallel_rank 3 is out of range [0, 1025)."), RankError{Rank: 3, Local: 1025}, false},
		{"no JSON", 400, []byte(python), RankError{}, false},
		{"a message that is a number", 400, []byte(`{"error":{"message":7}}`), RankError{}, false},
		{"too long", 400, rankError(python + strings.Repeat(" ", maxRankErrorBytes)), RankError{}, false},
	} {
		got, ok := ParseRankError(c.status, c.body)
		if ok != c.ok || ok && !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, %v, want %+v, %v", c.name, got, ok, c.want, c.ok)
		}
	}
}

func TestRankNumbers(t *testing.T) {
	local := func(n int) *RankError { return &RankError{Rank: ProbeRank, Local: n} }
	connected := func(ranks ...int) *RankError { return &RankError{Rank: ProbeRank, Connected: ranks} }
	for _, c := range []struct {
		name   string
		labels []int
		probe  *RankError
		want   []int // nil: unknown
	}{
		{"one engine", []int{0}, nil, nil},
		{"from 0", []int{0, 1, 2, 3}, nil, []int{0, 1, 2, 3}},
		{"from 4, Python", []int{4, 5, 6, 7}, local(4), []int{0, 1, 2, 3}},
		{"from 4, Rust", []int{4, 5, 6, 7}, connected(4, 5, 6, 7), []int{4, 5, 6, 7}},
		{"from 4, Rust, not in order", []int{4, 5, 6, 7}, connected(7, 5, 6, 4), []int{4, 5, 6, 7}},
		{"from 4, header ignored", []int{4, 5, 6, 7}, nil, nil},
		// Label 2 is also a place among the four: only the probe tells what it means.
		{"from 2, Python", []int{2, 3, 4, 5}, local(4), []int{0, 1, 2, 3}},
		{"from 2, Rust", []int{2, 3, 4, 5}, connected(2, 3, 4, 5), []int{2, 3, 4, 5}},
		{"from 2, header ignored", []int{2, 3, 4, 5}, nil, nil},
		{"from 4, Python that counts all servers' engines", []int{4, 5, 6, 7}, local(8), nil},
		{"from 4, Python with another number", []int{4, 5, 6, 7}, local(3), nil},
		{"from 4, Rust with others", []int{4, 5, 6, 7}, connected(4, 5, 6), nil},
		{"a gap, Python", []int{0, 1, 3}, local(3), []int{0, 1, 2}},
		{"a gap, Rust", []int{0, 1, 3}, connected(0, 1, 3), []int{0, 1, 3}},
		{"a gap, unknown", []int{0, 1, 3}, nil, nil},
	} {
		got, ok := RankNumbers(c.labels, c.probe)
		if ok != (c.want != nil) || ok && !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, %v, want %v", c.name, got, ok, c.want)
		}
	}
}

func FuzzParseRankError(f *testing.F) {
	f.Add(rankError("data_parallel_rank 65534 is out of range [0, 4)."))
	f.Add(rankError("data parallel rank 65534 is not connected to this frontend; connected ranks: [4, 5, 6, 7]"))
	f.Add([]byte(`{"error":"x"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		e, ok := ParseRankError(http.StatusBadRequest, body)
		if !ok {
			return
		}
		if e.Rank < 0 || e.Rank > maxEngineLabel || (e.Local > 0) == (len(e.Connected) > 0) || e.Local > maxEngines ||
			len(e.Connected) > maxEngines {
			t.Errorf("%+v", e)
		}
		for _, n := range e.Connected {
			if n < 0 || n > maxEngineLabel {
				t.Errorf("%+v", e)
			}
		}
	})
}
