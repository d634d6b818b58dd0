/* Rows of CPU ranks: deep_ep/engines/exchange.py, "What makes reuse safe".

   A rank offers one of its two places with its step, the others write a row each to the offered places and raise
   WRITTEN, and who has seen WRITTEN of all has a result, which it may keep during the next call. A result must stay
   what it was until it is dropped. Unless CALM, waits may run out and ranks may be late in the middle of writing.

   Mutations: FLAG_FIRST, OFFER_IN_USE, NO_NUMBER. */

#define RANKS 2
#define CALLS 3
#define NONE 2
#define ROW(dst, place, src) (((dst) * 2 + (place)) * RANKS + (src))
#ifdef NO_NUMBER
#define IS_WRITTEN(rank, n) (written[rank] > 0)
#else
#define IS_WRITTEN(rank, n) (written[rank] >= n)
#endif

byte step[RANKS];
byte written[RANKS];
byte offer[2 * RANKS]; /* of steps with even and odd numbers */
byte row[2 * RANKS * RANKS];

active [RANKS] proctype rank() {
  byte n = 1, peer, kept = NONE, kept_call, place;
  do
  :: n > CALLS -> break
  :: else ->
     /* A result that is kept keeps its place. */
#ifdef OFFER_IN_USE
     place = 0;
#else
     place = (kept == 0 -> 1 : 0);
#endif
     offer[2 * _pid + n % 2] = place;
     step[_pid] = n;
     peer = 0;
     do
     :: peer < RANKS ->
        if
        :: step[peer] >= n -> peer++
#ifndef CALM
        :: step[peer] < n -> goto gives_up
#endif
        fi
     :: else -> break
     od;
#ifdef FLAG_FIRST
     written[_pid] = n;
#endif
     peer = 0;
     do
     :: peer < RANKS -> row[ROW(peer, offer[2 * peer + n % 2], _pid)] = n; peer++
     :: else -> break
     od;
#ifndef FLAG_FIRST
     written[_pid] = n;
#endif
     peer = 0;
     do
     :: peer < RANKS ->
        if
        :: IS_WRITTEN(peer, n) -> assert(row[ROW(_pid, place, peer)] == n); peer++
#ifndef CALM
        :: !IS_WRITTEN(peer, n) -> goto gives_up
#endif
        fi
     :: else -> break
     od;
     if
     :: kept != NONE ->
        peer = 0;
        do
        :: peer < RANKS -> assert(row[ROW(_pid, kept, peer)] == kept_call); peer++
        :: else -> break
        od;
        kept = NONE
     :: kept == NONE -> kept = place; kept_call = n
     :: kept == NONE -> skip /* dropped at once */
     fi;
     n++
  od;
gives_up:
  skip
}
