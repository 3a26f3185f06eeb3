package main

import (
	"strings"
	"testing"

	"warmroute/lab/replay"
)

func TestWriteWekaTurns(t *testing.T) {
	trace, err := replay.ParseTrace(strings.NewReader(`{"timestamp":0,"input_length":1100,"output_length":100,"session":1,"hash_ids":[70,71,72]}
{"timestamp":500,"input_length":600,"output_length":7,"session":1,"hash_ids":[70,80]}
{"timestamp":1000,"input_length":1900,"output_length":9,"session":1,"hash_ids":[70,71,73,74]}
{"timestamp":2000,"input_length":1100,"output_length":3,"session":2,"hash_ids":[70,71,90]}
`))
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := writeWekaTurns(&out, trace); err != nil {
		t.Fatal(err)
	}
	// The third request continues the first and adds 1900 - 1200 tokens, of which the last full block is one.
	want := `{"id":"0","requests":[{"t":0,"in":1100,"out":100,"hash_ids":[0,1]},{"t":1,"in":700,"out":9,"hash_ids":[2]}]}
{"id":"1","requests":[{"t":0.5,"in":600,"out":7,"hash_ids":[0]}]}
{"id":"2","requests":[{"t":2,"in":1100,"out":3,"hash_ids":[0,1]}]}
`
	if out.String() != want {
		t.Errorf("got\n%swant\n%s", out.String(), want)
	}
}
