package vllm

import (
	"bufio"
	"bytes"
	"os"
	"testing"
)

func BenchmarkParseMetrics(b *testing.B) {
	text, err := os.ReadFile("testdata/metrics-0.32.txt")
	if err != nil {
		b.Fatal(err)
	}
	br := bufio.NewReaderSize(nil, MaxLineBytes)
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		br.Reset(bytes.NewReader(text))
		if _, err := ParseMetrics(br); err != nil {
			b.Fatal(err)
		}
	}
}
