package config

import "testing"

func TestParseByteSize(t *testing.T) {
	f := func(text string, want int64, shown string) {
		t.Helper()
		got, err := parseByteSize(text)
		if err != nil || got != want || formatByteSize(got) != shown {
			t.Errorf("%q: got %d (%s), %v; want %d (%s)", text, got, formatByteSize(got), err, want, shown)
		}
	}
	f("0", 0, "0B")
	f("67108864", 64<<20, "64MiB")
	f("64MiB", 64<<20, "64MiB")
	f("64MB", 64e6, "64MB")
	f(" 64 mib ", 64<<20, "64MiB")
	f("1TiB", 1<<40, "1TiB")
	f("1023B", 1023, "1023B")
	f("-1KiB", -1024, "-1KiB")
	for _, bad := range []string{"", "MiB", "64M", "1.5GiB", "9223372036854775808", "9223372036854775807KiB", "0x10", "1 GiB 2"} {
		if got, err := parseByteSize(bad); err == nil {
			t.Errorf("%q: got %d, want an error", bad, got)
		}
	}
}
