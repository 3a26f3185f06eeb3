//go:build race

package proxy

// poolsForget tells that the race detector has pools forget some of what is put in them, by chance.
const poolsForget = true
